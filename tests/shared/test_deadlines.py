"""Timeouts, followers and cancels: a request that nobody waits for ends once, with the ending that says why."""

import asyncio
from typing import Any

import pytest

from shared.errors import Conflict
from tessera.common.v1 import ending_pb2
from tessera.common.v1.ending_pb2 import Ending
from tests.support.queue_desk import CANCELLED, STOP, Desk

FAILED = Ending(reason=ending_pb2.FINISH_REASON_ERROR)


async def reason_of(desk: Desk, rid: str) -> str:
    """The failure's reason, or "" for one that has not failed."""
    ending = await desk.ending(rid)
    return "" if ending is None else ending.failure.reason


async def was_cancelled(desk: Desk, rid: str) -> bool:
    ending = await desk.ending(rid)
    return ending is not None and ending.reason == CANCELLED


async def age(desk: Desk, rid: str, ms: int) -> None:
    """Lets a request have arrived, and have been followed, so much earlier."""
    for field in ("arrived_ms", "fol_until"):
        await desk.redis.hincrby(desk.keys.request(rid), field, -ms)


async def up_long(desk: Desk) -> None:
    """Redis has been there for long, so that followers had time to say that they are there."""
    desk.with_lifetimes(grace_ms=0)
    await desk.queue.sweep()


async def test_each_timeout_has_its_own_ending(desk: Desk) -> None:
    waiting = {
        "QUEUE_TIMEOUT": await desk.admit(queue_timeout_ms=1, timeout_ms=10_000),
        "FIRST_TOKEN_TIMEOUT": await desk.admit(first_token_timeout_ms=1),
        "REQUEST_TIMEOUT": await desk.admit(timeout_ms=1, queue_timeout_ms=10_000),
        "": await desk.admit(timeout_ms=10_000),
    }
    await asyncio.sleep(0.02)
    recovery = f"{desk.keys.prefix}:recovery"
    await desk.redis.set(recovery, "1")  # it might be running, for all that Redis knows
    assert await desk.queue.expire(list(waiting.values())) == []
    assert await desk.queue.sweep() == 0
    await desk.redis.delete(recovery)
    ended = await desk.queue.expire(list(waiting.values()))
    assert ended == list(waiting.values())[:3]
    for reason, rid in waiting.items():
        assert await reason_of(desk, rid) == reason
    found = await desk.ending(ended[0])
    assert found is not None and found.failure.code == 4  # DEADLINE_EXCEEDED
    assert await desk.queue.depth() == (1, 8)


async def test_a_request_that_was_begun_no_longer_has_a_queue_timeout(desk: Desk) -> None:
    times = {"queue_timeout_ms": 60_000, "first_token_timeout_ms": 80_000, "timeout_ms": 200_000}
    rid = await desk.admit(**times, follow_ms=0)
    await desk.scheduler("a")
    assert await desk.take("a") == [rid]
    await desk.append("a", rid, 0, [1])
    await age(desk, rid, 100_000)
    await desk.queue.give_back("a", [rid])
    assert await desk.queue.expire([rid]) == []
    assert await desk.take("a") == [rid]
    await age(desk, rid, 100_001)
    # Its owner ends it while it runs; where it goes back instead, it ends there.
    assert await desk.queue.expire([rid]) == []
    await desk.queue.give_back("a", [rid])
    assert await reason_of(desk, rid) == "REQUEST_TIMEOUT"
    assert await desk.tokens(rid) == [1]
    state = await desk.queue.lookup(rid, "")
    assert state is not None and state.state == "ended" and state.attempts == 2
    assert state.ended_ms >= state.first_token_ms >= state.taken_ms >= state.arrived_ms > 0


async def test_neither_take_nor_sweep_leaves_the_late_waiting(desk: Desk) -> None:
    late = [await desk.admit(timeout_ms=1) for _ in range(3)]
    await asyncio.sleep(0.02)
    await desk.scheduler("a")
    rid = await desk.admit()
    assert await desk.take("a", 1) == [rid]
    assert [await reason_of(desk, one) for one in late] == ["REQUEST_TIMEOUT"] * 3
    late = [await desk.admit(timeout_ms=1) for _ in range(3)]
    await asyncio.sleep(0.02)
    assert await desk.queue.sweep() == 3
    assert await desk.queue.sweep() == 0
    assert [await reason_of(desk, one) for one in late] == ["REQUEST_TIMEOUT"] * 3


async def test_a_request_that_nobody_follows_ends(desk: Desk) -> None:
    await up_long(desk)
    left, kept, running = [await desk.admit(follow_ms=1) for _ in range(3)]
    await desk.queue.follow({kept: 60_000, running: 60_000})
    await desk.queue.follow(
        {kept: 1, "unknown": 1}
    )  # another follower, who would have it end sooner
    await asyncio.sleep(0.02)
    await desk.scheduler("a")
    assert await desk.take("a") == [kept, running]
    assert await was_cancelled(desk, left)
    assert await desk.queue.abandoned([kept, running]) == []
    await age(desk, running, 60_001)
    assert await desk.queue.abandoned([running, kept, "unknown"]) == [running]
    waiting = await desk.admit(follow_ms=1)
    await asyncio.sleep(0.02)
    assert await desk.queue.sweep() == 1
    assert await was_cancelled(desk, waiting)
    await desk.queue.give_back("a", [running])
    assert await was_cancelled(desk, running)


async def test_followers_have_time_to_come_back_after_redis_was_away(desk: Desk) -> None:
    await desk.scheduler("a")
    rids = [await desk.admit(follow_ms=1) for _ in range(2)]
    await desk.redis.hset(f"{desk.keys.prefix}:meta", "checked_ms", 1)
    assert await desk.take("a", 1) == rids[:1]
    await asyncio.sleep(0.02)
    assert await desk.queue.abandoned(rids) == []
    assert await desk.queue.sweep() == 0
    assert await desk.queue.expire(rids) == []
    await desk.queue.follow(dict.fromkeys(rids, 60_000))
    desk.with_lifetimes(grace_ms=0)
    assert await desk.queue.abandoned(rids) == []
    assert await desk.take("a", 1) == rids[1:]


async def test_a_dead_scheduler_leaves_endings_to_those_who_must_not_run_again(desk: Desk) -> None:
    await up_long(desk)
    desk.with_lifetimes(lease_ms=30, grace_ms=0)
    cancelled, late = await desk.admit(tenant="t"), await desk.admit(timeout_ms=60_000)
    left, whole = await desk.admit(), await desk.admit()
    await desk.scheduler("dead")
    assert len(await desk.take("dead")) == 4
    assert await desk.queue.cancel(cancelled, "t") == "FLAGGED"
    for rid in (late, left):
        await age(desk, rid, 60_000)
    await desk.redis.hset(desk.keys.request(late), "fol_until", 0)
    renewal = await desk.queue.renew(
        "live", (await desk.queue.loads())[0], register=True, tokens_per_s=None
    )
    assert renewal is not None
    await asyncio.sleep(0.05)
    assert await desk.queue.fence("dead", renewal.others["dead"]) == 4
    assert await was_cancelled(desk, cancelled) and await was_cancelled(desk, left)
    assert await reason_of(desk, late) == "REQUEST_TIMEOUT"
    assert await desk.queue.depth() == (1, 8)
    await desk.scheduler("live")
    assert await desk.take("live") == [whole]


@pytest.mark.parametrize("ending", [Ending(reason=CANCELLED), FAILED])
async def test_a_key_is_free_again_unless_its_request_finished(desk: Desk, ending: Ending) -> None:
    await desk.scheduler("a")
    key: dict[str, Any] = {"idempotency_key": "k", "fingerprint": b"body"}
    failed = await desk.admit(**key)
    assert await desk.reserve("other", **key) == failed
    assert await desk.take("a") == [failed]
    await desk.append("a", failed, 0, [1], ending)
    spec = desk.spec()
    assert await desk.reserve(spec.request_id, **key) == spec.request_id
    await desk.queue.admit(spec, cost=8, **key)
    assert await desk.take("a") == [spec.request_id]
    await desk.append("a", spec.request_id, 0, [1], STOP)
    assert await desk.reserve("other", **key) == spec.request_id
    assert 0 < await desk.redis.ttl(f"{desk.keys.prefix}:idem::{spec.idempotency}") <= 600


async def test_of_two_with_one_key_the_first_to_be_admitted_goes_on(desk: Desk) -> None:
    desk.with_lifetimes(reservation_ms=1)
    slow, quick = desk.spec(), desk.spec()
    key: dict[str, Any] = {"idempotency_key": "k", "fingerprint": b"body"}
    await desk.reserve(slow.request_id, **key)
    await asyncio.sleep(0.01)
    assert await desk.reserve(quick.request_id, **key) == quick.request_id
    await desk.queue.admit(slow, cost=8, **key)
    with pytest.raises(Conflict) as caught:
        await desk.queue.admit(quick, cost=8, **key)
    assert caught.value.metadata["request_id"] == slow.request_id
    assert await desk.queue.depth() == (1, 8)
    assert await desk.queue.cancel(slow.request_id) == "CANCELLED"
    assert await desk.reserve("third", **key) == "third"


async def test_a_request_deleted_by_hand_stops_nobody_else(desk: Desk) -> None:
    gone, left = await desk.admit(timeout_ms=1), await desk.admit()
    await desk.redis.delete(desk.keys.request(gone))
    await asyncio.sleep(0.01)
    await desk.queue.sweep()
    await desk.scheduler("a")
    assert await desk.take("a") == [left]
