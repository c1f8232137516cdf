"""Twin of sweep.lua."""

from tests.simulation.scripts.prelude import Prelude, Reply


def run(lua: Prelude) -> Reply:
    P = lua.P
    close = lua.closing()
    now_ms = lua.now_ms()
    awake = lua.up_since_ms(now_ms)
    if lua.call("EXISTS", P + ":recovery") == 1:
        return 0
    lua.free_late_reservations(now_ms)
    ended = 0
    for rid in lua.call("ZRANGEBYSCORE", P + ":due", "-inf", now_ms, "LIMIT", 0, 1000):
        if lua.end_if_due(rid, now_ms, awake, close):
            ended = ended + 1
        else:
            lua.call("ZADD", P + ":due", lua.may_wait_until(rid, awake, close)[0], rid)
    for prio in ("interactive", "batch"):
        if lua.call("EXISTS", f"{P}:tenants:{prio}") == 1:
            lua.call("ZREMRANGEBYSCORE", f"{P}:idle:{prio}", "-inf", lua.floor_of(prio))
        else:
            lua.call("DEL", f"{P}:idle:{prio}")
            lua.call("HDEL", P + ":meta", "floor:" + prio)
    for sid in lua.call("HKEYS", P + ":load"):
        if lua.call("ZSCORE", P + ":scheds", sid) is None:
            lua.call("HDEL", P + ":load", sid)
    for did in lua.call("HKEYS", P + ":leases"):
        sid = lua.call("HGET", P + ":bound", did)
        is_bound = sid is not None and lua.call("ZSCORE", P + ":scheds", sid) is not None
        if not is_bound and lua.call("ZSCORE", P + ":instances:decoder", did) is None:
            lua.call("HDEL", P + ":leases", did)
            lua.call("HDEL", P + ":bound", did)
    return ended
