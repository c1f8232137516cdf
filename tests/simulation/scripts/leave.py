"""Twin of leave.lua."""

from tests.simulation.scripts.prelude import Prelude, Reply


def run(lua: Prelude) -> Reply:
    close, sid = lua.closing(), lua.ARGV[7]
    for rid in sorted(lua.call("SMEMBERS", f"{lua.P}:own:{sid}")):
        lua.put_back(rid, close)
    lua.call("ZREM", lua.P + ":scheds", sid)
    lua.call("HDEL", lua.P + ":load", sid)
    lua.call("DEL", f"{lua.P}:own:{sid}")
    lua.call("PUBLISH", lua.P + ":ctl", "q")
    return 1
