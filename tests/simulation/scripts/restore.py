"""Twin of restore.lua."""

from tests.simulation.scripts.prelude import Prelude, Reply, integer, num, sub

LOGS = 30


def run(lua: Prelude) -> Reply:
    ARGV, P = lua.ARGV, lua.P
    close, q = lua.closing(), lua.request_at(7)
    sid, own_at, lease_ms, arrived_ms, rank = (
        ARGV[23],
        num(ARGV[24]),
        num(ARGV[25]),
        ARGV[26],
        ARGV[27],
    )
    deaths = ARGV[29]
    rid, r = q.rid, lua.request(q.rid)
    if lua.call("EXISTS", P + ":recovery") == 0 and (sid != "" or lua.call("EXISTS", r) == 1):
        return 0
    now_ms = lua.now_ms()
    logs: dict[int | str, str] = {"p": ARGV[28]}
    for c in range(int(q.n)):
        logs[c] = ARGV[LOGS + 2 * c]

    def agrees() -> bool:
        for c, known in logs.items():
            there = lua.call("GET", lua.log_of(rid, c)) or ""
            both = min(len(there), len(known))
            if sub(there, 1, both) != sub(known, 1, both):
                return False
        return True

    def extend() -> None:
        for c, known in logs.items():
            length = lua.call("STRLEN", lua.log_of(rid, c))
            if len(known) > length:
                lua.call("APPEND", lua.log_of(rid, c), sub(known, length + 1))
        for c in range(int(q.n)):
            ending = ARGV[LOGS + 2 * c + 1]
            if ending != "" and lua.call("HSETNX", r, f"e{c}", ending) == 1:
                lua.call("HINCRBY", r, "open", -1)

    def own(owner: str) -> None:
        if owner != "":
            lua.call("SREM", f"{P}:own:{owner}", rid)
        lua.call("HSET", r, "state", "running", "owner", sid, "own_at", integer(own_at))
        if lua.call("HGET", r, "taken_ms") == "0":
            lua.call("HSET", r, "taken_ms", integer(own_at // 1000), "attempts", 1)
        lua.call("SADD", f"{P}:own:{sid}", rid)
        lua.call("ZADD", P + ":scheds", "NX", now_ms + lease_ms, sid)

    f = lua.call("HMGET", r, "state", "owner", "own_at")
    state, owner = f[0], f[1] or ""
    if state == "ended":
        for c in range(int(q.n)):
            if ARGV[LOGS + 2 * c + 1] == "" and sid != "":
                return 0
        return 1
    if sid != "" and owner != "" and owner != sid and num(f[2]) >= own_at:
        return 0
    if not agrees():
        if sid != "" and owner == sid:
            lua.keep_deaths(rid, deaths)
            lua.put_back(rid, close)
        return 0
    if state is None:
        lua.create(q, now_ms, num(arrived_ms), num(rank))
    lua.keep_deaths(rid, deaths)
    lua.bind_key(q)
    extend()
    if num(lua.call("HGET", r, "open")) <= 0:
        lua.dequeue(rid)
        lua.retire(rid, close.keep_s)
    elif sid != "":
        lua.dequeue(rid)
        own(owner)
    elif state is None:
        lua.enqueue(rid, q.prio, q.tenant, rank, close)
    return 1
