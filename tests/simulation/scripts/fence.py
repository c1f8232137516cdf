"""Twin of fence.lua."""

from tests.simulation.scripts.prelude import Prelude, Reply, num


def run(lua: Prelude) -> Reply:
    close, dead = lua.closing(), lua.ARGV[7]
    if lua.call("EXISTS", lua.P + ":recovery") == 1:
        return -1
    deadline = lua.call("ZSCORE", lua.P + ":scheds", dead)
    if deadline is None or num(deadline) != num(lua.ARGV[8]):
        return -1
    if num(deadline) >= lua.now_us() / 1000:
        return -1
    lua.call("ZREM", lua.P + ":scheds", dead)
    lua.call("HDEL", lua.P + ":load", dead)
    rids = sorted(lua.call("SMEMBERS", f"{lua.P}:own:{dead}"))
    for rid in rids:
        lua.put_back(rid, close)
    lua.call("DEL", f"{lua.P}:own:{dead}")
    return len(rids)
