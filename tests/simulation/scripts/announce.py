"""Twin of announce.lua."""

from tests.simulation.scripts.prelude import Prelude, Reply, num


def run(lua: Prelude) -> Reply:
    ARGV = lua.ARGV
    members, at = f"{lua.P}:instances:{ARGV[1]}", f"{lua.P}:addresses:{ARGV[1]}"
    if ARGV[3] == "":
        lua.call("ZREM", members, ARGV[2])
        lua.call("HDEL", at, ARGV[2])
        return 1
    now_ms = lua.now_ms()
    lua.call("ZADD", members, now_ms + num(ARGV[4]), ARGV[2])
    lua.call("HSET", at, ARGV[2], ARGV[3])
    for dead in lua.call("ZRANGEBYSCORE", members, "-inf", now_ms - num(ARGV[5])):
        lua.call("ZREM", members, dead)
        lua.call("HDEL", at, dead)
    lua.call("PEXPIRE", members, ARGV[5])
    lua.call("PEXPIRE", at, ARGV[5])
    return 1
