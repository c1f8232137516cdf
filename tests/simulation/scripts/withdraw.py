"""Twin of withdraw.lua."""

from tests.simulation.scripts.prelude import Prelude, Reply


def run(lua: Prelude) -> Reply:
    ARGV = lua.ARGV
    lua.call("ZREM", lua.P + ":resv", ARGV[1])
    if lua.call("EXISTS", lua.request(ARGV[1])) == 0:
        lua.forget_live(ARGV[1])
        if ARGV[2] != "" and lua.call("HGET", ARGV[2], "rid") == ARGV[1]:
            lua.call("DEL", ARGV[2])
    return 1
