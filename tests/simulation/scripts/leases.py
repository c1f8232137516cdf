"""Twin of leases.lua."""

from tests.simulation.scripts.prelude import Prelude, Reply, num


def run(lua: Prelude) -> Reply:
    now_ms = lua.now_ms()
    bound = lua.call("HGETALL", lua.P + ":bound")
    answer = []
    for did, sid in zip(bound[::2], bound[1::2], strict=True):
        deadline = lua.call("ZSCORE", lua.P + ":scheds", sid)
        if deadline is not None and num(deadline) >= now_ms:
            answer += [did, sid]
    return answer
