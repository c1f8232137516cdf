"""Twin of renew.lua."""

from tests.simulation.scripts.prelude import Prelude, Reply, integer, num


def run(lua: Prelude) -> Reply:
    ARGV = lua.ARGV
    sid = ARGV[1]
    now_ms = lua.now_ms()
    scheds = lua.P + ":scheds"
    may_enter = ARGV[3] == "1" or lua.call("EXISTS", lua.P + ":recovery") == 1
    if not may_enter and lua.call("ZSCORE", scheds, sid) is None:
        return ["GONE"]
    lua.call("ZADD", scheds, now_ms + num(ARGV[2]), sid)
    lua.call("HSET", lua.P + ":load", sid, ARGV[4])
    if ARGV[5] != "":
        lua.call("HSET", lua.P + ":meta", "tokens_per_s", ARGV[5])
    answer = ["OK", integer(now_ms)]
    all_ = lua.call("ZRANGE", scheds, 0, -1, "WITHSCORES")
    for other, deadline in zip(all_[::2], all_[1::2], strict=True):
        if other != sid:
            answer += [other, deadline]
    return answer
