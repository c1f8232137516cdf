"""Twin of cancel.lua."""

from tests.simulation.scripts.prelude import Prelude, Reply


def run(lua: Prelude) -> Reply:
    close, rid = lua.closing(), lua.ARGV[7]
    r = lua.request(rid)
    f = lua.call("HMGET", r, "state", "tenant")
    if f[0] is None or f[1] != lua.ARGV[8]:
        return "UNKNOWN"
    if f[0] == "ended":
        return "ENDED"
    if lua.ARGV[9] == "1" and lua.call("HGET", r, "joined") is not None:
        return "FOLLOWED"
    lua.call("HSET", r, "cancel", 1)
    if f[0] == "queued":
        lua.dequeue(rid)
        lua.end_all(rid, close.cancelled, close.keep_s)
        return "CANCELLED"
    lua.call("PUBLISH", lua.P + ":ctl", "c" + rid)
    return "FLAGGED"
