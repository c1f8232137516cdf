"""Twin of reserve.lua."""

import math

from tests.simulation.scripts.prelude import Prelude, Reply, num


def run(lua: Prelude) -> Reply:
    ARGV, P = lua.ARGV, lua.P
    rid, cost, idem = ARGV[1], num(ARGV[2]), ARGV[6]
    now_ms = lua.now_ms()
    lua.free_late_reservations(now_ms)
    if idem != "":
        known = lua.call("HMGET", idem, "rid", "fingerprint")
        if known[0] is not None and (
            lua.call("HEXISTS", P + ":live", known[0]) + lua.call("EXISTS", lua.request(known[0]))
            > 0
        ):
            if known[1] != "" and known[1] != ARGV[7]:
                return ["CONFLICT", known[0]]
            return ["EXISTS", known[0]]
    live = lua.call("HLEN", P + ":live")
    tokens = num(lua.call("HGET", P + ":meta", "live_tokens") or 0)
    rate = max(1, num(lua.call("HGET", P + ":meta", "tokens_per_s") or 100))
    if live >= num(ARGV[3]):
        return ["FULL", "requests", max(1, math.ceil(tokens / max(1, live) / rate))]
    over = tokens + cost - num(ARGV[4])
    if over > 0 and tokens > 0:
        return ["FULL", "tokens", max(1, math.ceil(over / rate))]
    lua.set_live(rid, cost)
    lua.call("ZADD", P + ":resv", now_ms + num(ARGV[5]), rid)
    if idem != "":
        lua.call("HSET", idem, "rid", rid, "fingerprint", ARGV[7])
        lua.call("EXPIRE", idem, ARGV[8])
    return ["OK"]
