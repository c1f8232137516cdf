"""Twin of expire.lua."""

from tests.simulation.scripts.prelude import Prelude, Reply


def run(lua: Prelude) -> Reply:
    close = lua.closing()
    now_ms = lua.now_ms()
    awake = lua.up_since_ms(now_ms)
    ended: list[str] = []
    if lua.call("EXISTS", lua.P + ":recovery") == 1:
        return ended
    for rid in lua.ARGV[7:]:
        if lua.call("HGET", lua.request(rid), "state") == "queued":
            if lua.end_if_due(rid, now_ms, awake, close):
                ended.append(rid)
    return ended
