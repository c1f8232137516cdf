"""Twin of media_reserve.lua."""

from tests.simulation.scripts.prelude import Prelude, Reply, num


def run(lua: Prelude) -> Reply:
    ARGV = lua.ARGV
    expiry, sizes, total_key = lua.P + ":expiry", lua.P + ":sizes", lua.P + ":total"
    now_ms = lua.now_ms()
    for gone in lua.call("ZRANGEBYSCORE", expiry, "-inf", now_ms, "LIMIT", 0, 1000):
        lua.call("DECRBY", total_key, lua.call("HGET", sizes, gone))
        lua.call("ZREM", expiry, gone)
        lua.call("HDEL", sizes, gone)
    if lua.call("HEXISTS", sizes, ARGV[1]) == 0:
        total = num(lua.call("GET", total_key) or "0")
        if total + num(ARGV[2]) > num(ARGV[4]):
            return 0
        lua.call("HSET", sizes, ARGV[1], ARGV[2])
        lua.call("INCRBY", total_key, ARGV[2])
    lua.call("ZADD", expiry, now_ms + num(ARGV[3]), ARGV[1])
    return 1
