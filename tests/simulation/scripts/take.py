"""Twin of take.lua."""

import math

from tests.simulation.scripts.prelude import Number, Prelude, Reply, integer, num


def run(lua: Prelude) -> Reply:
    ARGV, P = lua.ARGV, lua.P
    close, sid, room_requests, room_tokens = lua.closing(), ARGV[7], num(ARGV[8]), num(ARGV[9])
    if lua.call("EXISTS", P + ":recovery") == 1:
        return ["RECOVERING"]
    if lua.call("ZSCORE", P + ":scheds", sid) is None:
        return ["GONE"]
    now = lua.now_us()
    now_ms = now // 1000
    awake = lua.up_since_ms(now_ms)
    known = lua.call("HGET", P + ":meta", "mean_output")
    mean_output = num(math.inf if known is None else known)
    turn = num(lua.call("HGET", P + ":meta", "takes") or 0)
    taken: list[Reply] = ["OK"]

    def next_tenant() -> tuple[str, str, str] | None:
        first, second = "interactive", "batch"
        if turn % 10 == 9:
            first, second = second, first
        for prio in (first, second):
            tenant = lua.call("ZRANGE", f"{P}:tenants:{prio}", 0, 0, "WITHSCORES")
            if tenant:
                return prio, tenant[0], tenant[1]
        return None

    def expected_tokens(rid: str) -> Number:
        f = lua.call("HMGET", lua.request(rid), "cost", "prompt_tokens", "media_cost")
        return num(f[1]) + num(f[2]) + min(num(f[0]) - num(f[1]), mean_output)

    def own(rid: str) -> Reply:
        r = lua.request(rid)
        f = lua.call("HMGET", r, "spec", "arrived_ms", "n", "prio", "rank", "taken_ms", "deaths")
        lua.call("HSET", r, "state", "running", "owner", sid, "own_at", integer(now))
        if f[5] == "0":
            lua.call("HSET", r, "taken_ms", integer(now_ms))
        lua.call("SADD", f"{P}:own:{sid}", rid)
        logs = []
        for c in range(int(f[2])):
            logs.append(lua.call("GET", lua.log_of(rid, c)) or "")
            logs.append(lua.call("HGET", r, f"e{c}") or "")
        prompt_log = lua.call("GET", lua.log_of(rid, "p")) or ""
        attempts = lua.call("HINCRBY", r, "attempts", 1)
        return [f[0], integer(now), f[1], logs, f[3], prompt_log, f[4], attempts, f[6] or "0"]

    while room_requests > 0:
        found = next_tenant()
        if found is None:
            break
        prio, tenant, counter = found
        waiting = f"{P}:w:{prio}:{tenant}"
        first = lua.call("ZRANGE", waiting, 0, 0)
        rid = first[0] if first else ""
        if not first:
            lua.call("ZREM", f"{P}:tenants:{prio}", tenant)
        elif lua.call("HGET", lua.request(rid), "state") != "queued":
            lua.call("ZREM", waiting, rid)
        elif not lua.end_if_due(rid, now_ms, awake, close):
            tokens = expected_tokens(rid)
            if tokens > room_tokens and len(taken) > 1:
                break
            lua.call("HSET", P + ":meta", "floor:" + prio, counter)
            lua.charge(rid, tokens)
            lua.dequeue(rid)
            taken.append(own(rid))
            room_requests = room_requests - 1
            room_tokens = room_tokens - tokens
            turn = turn + 1
    if len(taken) > 1:
        lua.call("HSET", P + ":meta", "takes", turn)
    return taken
