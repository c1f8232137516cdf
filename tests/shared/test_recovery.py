"""Redis comes back as another run: what it has lost is put back by those who know it, and nothing runs twice."""

import asyncio
from typing import Any

import pytest
from support.queue_desk import STOP, Desk

from services.launcher.embedded_redis import EmbeddedRedis
from shared.errors import Unavailable
from shared.queue import Held, TakenRequest
from shared.token_log import encode_tokens
from tessera.common.v1.ending_pb2 import Ending


async def hold(desk: Desk) -> None:
    await desk.redis.set(f"{desk.keys.prefix}:hold", "1", px=60_000)


async def end_hold(desk: Desk) -> None:
    await desk.redis.delete(f"{desk.keys.prefix}:hold")


def held(taken: TakenRequest, tokens: list[int], ending: Ending | None = None) -> Held:
    return Held(
        spec=taken.spec,
        logs=(encode_tokens(tokens),),
        endings=(ending,),
        own_at=taken.own_at,
        arrived_ms=taken.arrived_ms,
        prio=taken.prio,
        rank=taken.rank,
    )


async def take_one(desk: Desk, sid: str) -> TakenRequest:
    await desk.scheduler(sid)
    taken = await desk.queue.take(sid, max_requests=1, max_tokens=100)
    assert taken is not None
    return taken[0]


async def test_everything_is_back_after_all_was_lost(desk: Desk) -> None:
    await desk.admit(idempotency_key="k", fingerprint=b"body", tenant="t")
    running = await take_one(desk, "a")
    await desk.append("a", running.spec.request_id, 0, [1, 2, 3])
    waiting, ended = desk.spec(), desk.spec()
    for spec in (waiting, ended):
        await desk.queue.admit(spec, cost=8)
    depth = await desk.queue.depth()
    await desk.redis.flushall()
    assert await desk.queue.restore([held(running, [1, 2, 3])], "a") == [False]  # nothing to mend
    await hold(desk)
    assert await desk.queue.restore([held(running, [1, 2, 3])], "a") == [True]
    seen = Held(running.spec, (encode_tokens([1, 2]),), (None,), arrived_ms=1)
    gone = Held(ended, (encode_tokens([5]),), (STOP,), arrived_ms=2)
    new = Held(waiting, (encode_tokens([8, 9]),), (None,), arrived_ms=3)
    assert await desk.queue.restore([seen, gone, new]) == [True, True, True]
    assert await desk.queue.restore([seen, gone, new]) == [True, True, True]
    assert await desk.take("a") == []
    await end_hold(desk)
    assert await desk.queue.depth() == (depth[0] - 1, depth[1] - 8)
    assert await desk.append("a", running.spec.request_id, 3, [4]) == (0, 4)
    assert await desk.take("a") == [waiting.request_id]
    assert await desk.tokens(waiting.request_id) == [8, 9]
    assert await desk.tokens(ended.request_id) == [5]
    assert await desk.ending(ended.request_id) == STOP
    again: dict[str, Any] = {"tenant": "t", "idempotency_key": "k", "fingerprint": b"body"}
    assert await desk.door("other", **again) == running.spec.request_id


async def test_a_follower_lookup_and_leases_stand(desk: Desk) -> None:
    rid = await desk.admit(tenant="t", follow_ms=1)
    await desk.queue.follow({rid: 60_000})
    await take_one(desk, "a")
    assert await desk.queue.forsaken([rid]) == []
    assert await desk.queue.expire([rid]) == []
    await desk.append("a", rid, 0, [1])
    state = await desk.queue.lookup(rid, "t")
    assert state is not None and state.tokens == (1,) and state.attempts == 1
    assert state.arrived_ms <= state.taken_ms <= state.first_token_ms
    assert await desk.queue.lookup(rid, "another") is None
    await desk.queue.lease_decoder("d", "a")
    assert await desk.queue.leases() == {"d": "a"}
    assert await desk.queue.sweep() == 0


async def test_each_process_hears_once_that_redis_was_restarted(
    private_redis: EmbeddedRedis,
) -> None:
    desks = [Desk(private_redis.url) for _ in range(2)]
    heard = [asyncio.create_task(anext(aiter(desk.queue.recoveries()))) for desk in desks]
    rid = await desks[0].admit()
    await desks[1].scheduler("a")
    assert not any(task.done() for task in heard)
    await asyncio.sleep(0.05)
    private_redis.kill()
    with pytest.raises(Unavailable):
        await desks[0].queue.depth()
    await asyncio.to_thread(private_redis.start)
    assert await desks[1].take("a") == []
    await desks[0].queue.depth()
    await asyncio.gather(*heard)
    assert await desks[0].redis.pttl(f"{desks[0].keys.prefix}:hold") > 0
    await end_hold(desks[0])
    assert await desks[1].take("a") == [rid]
    for desk in desks:
        await desk.redis.aclose()
