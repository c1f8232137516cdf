"""Twin of abandoned.lua."""

from tests.simulation.scripts.prelude import Prelude, Reply, num


def run(lua: Prelude) -> Reply:
    now_ms = lua.now_ms()
    awake = lua.up_since_ms(now_ms)
    found = []
    for rid in lua.ARGV[2:]:
        f = lua.call("HMGET", lua.request(rid), "cancel", "fol_until")
        if f[0] == "1" or lua.followed_until(f[1], awake, num(lua.ARGV[1])) <= now_ms:
            found.append(rid)
    return found
