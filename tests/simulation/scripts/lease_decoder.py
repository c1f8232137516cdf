"""Twin of lease_decoder.lua."""

from tests.simulation.scripts.prelude import Prelude, Reply, integer, num


def run(lua: Prelude) -> Reply:
    P = lua.P
    did, sid = lua.ARGV[1], lua.ARGV[2]
    owner = lua.call("HGET", P + ":bound", did)
    if sid == "":
        if owner == lua.ARGV[3]:
            lua.call("HDEL", P + ":bound", did)
        return "0"
    if lua.call("EXISTS", P + ":recovery") == 1:
        return "0"
    now = lua.now_us()
    if owner is not None and owner != sid:
        deadline = lua.call("ZSCORE", P + ":scheds", owner)
        if deadline is not None and num(deadline) >= now / 1000:
            return "0"
    lease = max(num(lua.call("HGET", P + ":leases", did) or 0) + 1, now)
    lua.call("HSET", P + ":bound", did, sid)
    lua.call("HSET", P + ":leases", did, integer(lease))
    return integer(lease)
