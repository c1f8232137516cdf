"""Twin of join.lua."""

from tests.simulation.scripts.prelude import Prelude, Reply


def run(lua: Prelude) -> Reply:
    if lua.call("EXISTS", lua.request(lua.ARGV[1])) == 1:
        lua.call("HSET", lua.request(lua.ARGV[1]), "joined", 1)
    return 1
