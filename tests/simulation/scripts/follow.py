"""Twin of follow.lua."""

from tests.simulation.scripts.prelude import Prelude, Reply, integer, num


def run(lua: Prelude) -> Reply:
    now_ms = lua.now_ms()
    for i in range(1, lua.argc + 1, 2):
        r = lua.request(lua.ARGV[i])
        f = lua.call("HMGET", r, "state", "fol_until")
        until_ms = now_ms + num(lua.ARGV[i + 1])
        if f[0] is not None and f[0] != "ended" and until_ms > num(f[1]):
            lua.call("HSET", r, "fol_until", integer(until_ms))
    return 1
