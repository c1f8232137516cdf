"""Twin of members.lua."""

from tests.simulation.scripts.prelude import Prelude, Reply


def run(lua: Prelude) -> Reply:
    now_ms = lua.now_ms()
    live = lua.call("ZRANGEBYSCORE", f"{lua.P}:instances:{lua.ARGV[1]}", now_ms, "+inf")
    answer = []
    for member in sorted(live):
        answer.append(member)
        answer.append(lua.call("HGET", f"{lua.P}:addresses:{lua.ARGV[1]}", member))
    return answer
