"""Twin of admit.lua."""

from tests.simulation.scripts.prelude import Prelude, Reply, integer, num


def run(lua: Prelude) -> Reply:
    close, q = lua.closing(), lua.request_at(7)
    now = lua.now_us()
    now_ms = now // 1000
    if lua.call("EXISTS", lua.request(q.rid)) == 1:
        return ["OK", num(lua.call("HGET", lua.request(q.rid), "arrived_ms"))]
    lua.call("ZREM", lua.P + ":resv", q.rid)
    known = lua.bind_key(q)
    if known is not None:
        lua.forget_live(q.rid)
        return ["EXISTS", known]
    rank = now - num(lua.ARGV[23])
    lua.create(q, now_ms, now_ms, rank)
    lua.enqueue(q.rid, q.prio, q.tenant, integer(rank), close)
    return ["OK", now_ms]
