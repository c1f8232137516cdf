"""Timeouts, followers and cancels: an abandoned or late request ends once, with the reason in its ending."""

import asyncio
from typing import Any

import pytest

from shared.errors import Conflict
from tessera.common.v1 import ending_pb2
from tessera.common.v1.ending_pb2 import Ending
from tests.support.queue.client import CANCELLED, STOP, QueueClient

FAILED = Ending(reason=ending_pb2.FINISH_REASON_ERROR)


async def reason_of(client: QueueClient, rid: str) -> str:
    """The failure's reason, or "" for one that has not failed."""
    ending = await client.ending(rid)
    return "" if ending is None else ending.failure.reason


async def was_cancelled(client: QueueClient, rid: str) -> bool:
    ending = await client.ending(rid)
    return ending is not None and ending.reason == CANCELLED


async def age(client: QueueClient, rid: str, ms: int) -> None:
    """Lets a request have arrived, and have been followed, so much earlier."""
    for field in ("arrived_ms", "follow_until_ms"):
        await client.redis.hincrby(client.keys.request(rid), field, -ms)


async def up_long(client: QueueClient) -> None:
    """Redis has been there for long, so that followers had time to say that they are there."""
    client.with_lifetimes(grace_ms=0)
    await client.queue.sweep()


async def test_each_timeout_has_its_own_ending(client: QueueClient) -> None:
    waiting = {
        "QUEUE_TIMEOUT": await client.admit(queue_timeout_ms=1, timeout_ms=10_000),
        "FIRST_TOKEN_TIMEOUT": await client.admit(first_token_timeout_ms=1),
        "REQUEST_TIMEOUT": await client.admit(timeout_ms=1, queue_timeout_ms=10_000),
        "": await client.admit(timeout_ms=10_000),
    }
    await asyncio.sleep(0.02)
    recovery = f"{client.keys.prefix}:recovery"
    await client.redis.set(recovery, "1")  # it might be running, for all that Redis knows
    assert await client.queue.expire(list(waiting.values())) == []
    assert await client.queue.sweep() == 0
    await client.redis.delete(recovery)
    ended = await client.queue.expire(list(waiting.values()))
    assert ended == list(waiting.values())[:3]
    for reason, rid in waiting.items():
        assert await reason_of(client, rid) == reason
    found = await client.ending(ended[0])
    assert found is not None and found.failure.code == 4  # DEADLINE_EXCEEDED
    assert await client.queue.depth() == (1, 8)


async def test_a_request_that_was_begun_no_longer_has_a_queue_timeout(client: QueueClient) -> None:
    times = {"queue_timeout_ms": 60_000, "first_token_timeout_ms": 80_000, "timeout_ms": 200_000}
    rid = await client.admit(**times, follow_ms=0)
    await client.scheduler("a")
    assert await client.take("a") == [rid]
    await client.append("a", rid, 0, [1])
    await age(client, rid, 100_000)
    await client.queue.give_back("a", [rid])
    assert await client.queue.expire([rid]) == []
    assert await client.take("a") == [rid]
    await age(client, rid, 100_001)
    # Its owner ends it while it runs; where it goes back instead, it ends there.
    assert await client.queue.expire([rid]) == []
    await client.queue.give_back("a", [rid])
    assert await reason_of(client, rid) == "REQUEST_TIMEOUT"
    assert await client.tokens(rid) == [1]
    state = await client.queue.lookup(rid, "")
    assert state is not None and state.state == "ended" and state.attempts == 2
    assert state.ended_ms >= state.first_token_ms >= state.taken_ms >= state.arrived_ms > 0


async def test_take_and_sweep_both_end_late_requests(client: QueueClient) -> None:
    late = [await client.admit(timeout_ms=1) for _ in range(3)]
    await asyncio.sleep(0.02)
    await client.scheduler("a")
    rid = await client.admit()
    assert await client.take("a", 1) == [rid]
    assert [await reason_of(client, one) for one in late] == ["REQUEST_TIMEOUT"] * 3
    late = [await client.admit(timeout_ms=1) for _ in range(3)]
    await asyncio.sleep(0.02)
    assert await client.queue.sweep() == 3
    assert await client.queue.sweep() == 0
    assert [await reason_of(client, one) for one in late] == ["REQUEST_TIMEOUT"] * 3


async def test_a_request_without_followers_ends(client: QueueClient) -> None:
    await up_long(client)
    left, kept, running = [await client.admit(follow_ms=1) for _ in range(3)]
    await client.queue.follow({kept: 60_000, running: 60_000})
    await client.queue.follow(
        {kept: 1, "unknown": 1}
    )  # another follower, who would have it end sooner
    await asyncio.sleep(0.02)
    await client.scheduler("a")
    assert await client.take("a") == [kept, running]
    assert await was_cancelled(client, left)
    assert await client.queue.abandoned([kept, running]) == []
    await age(client, running, 60_001)
    assert await client.queue.abandoned([running, kept, "unknown"]) == [running]
    waiting = await client.admit(follow_ms=1)
    await asyncio.sleep(0.02)
    assert await client.queue.sweep() == 1
    assert await was_cancelled(client, waiting)
    await client.queue.give_back("a", [running])
    assert await was_cancelled(client, running)


async def test_followers_have_time_to_come_back_after_redis_was_away(client: QueueClient) -> None:
    await client.scheduler("a")
    rids = [await client.admit(follow_ms=1) for _ in range(2)]
    await client.redis.hset(f"{client.keys.prefix}:meta", "checked_ms", 1)
    assert await client.take("a", 1) == rids[:1]
    await asyncio.sleep(0.02)
    assert await client.queue.abandoned(rids) == []
    assert await client.queue.sweep() == 0
    assert await client.queue.expire(rids) == []
    await client.queue.follow(dict.fromkeys(rids, 60_000))
    client.with_lifetimes(grace_ms=0)
    assert await client.queue.abandoned(rids) == []
    assert await client.take("a", 1) == rids[1:]


async def test_late_requests_of_a_dead_scheduler_end_instead_of_running_again(
    client: QueueClient,
) -> None:
    await up_long(client)
    client.with_lifetimes(lease_ms=30, grace_ms=0)
    cancelled, late = await client.admit(tenant="t"), await client.admit(timeout_ms=60_000)
    left, whole = await client.admit(), await client.admit()
    await client.scheduler("dead")
    assert len(await client.take("dead")) == 4
    assert await client.queue.cancel(cancelled, "t") == "FLAGGED"
    for rid in (late, left):
        await age(client, rid, 60_000)
    await client.redis.hset(client.keys.request(late), "follow_until_ms", 0)
    renewal = await client.queue.renew(
        "live", (await client.queue.loads())[0], register=True, tokens_per_s=None
    )
    assert renewal is not None
    await asyncio.sleep(0.05)
    assert await client.queue.fence("dead", renewal.others["dead"]) == 4
    assert await was_cancelled(client, cancelled) and await was_cancelled(client, left)
    assert await reason_of(client, late) == "REQUEST_TIMEOUT"
    assert await client.queue.depth() == (1, 8)
    await client.scheduler("live")
    assert await client.take("live") == [whole]


@pytest.mark.parametrize("ending", [Ending(reason=CANCELLED), FAILED])
async def test_a_key_is_free_again_unless_its_request_finished(
    client: QueueClient, ending: Ending
) -> None:
    await client.scheduler("a")
    key: dict[str, Any] = {"idempotency_key": "k", "fingerprint": b"body"}
    failed = await client.admit(**key)
    assert await client.reserve("other", **key) == failed
    assert await client.take("a") == [failed]
    await client.append("a", failed, 0, [1], ending)
    spec = client.spec()
    assert await client.reserve(spec.request_id, **key) == spec.request_id
    await client.queue.admit(spec, cost=8, **key)
    assert await client.take("a") == [spec.request_id]
    await client.append("a", spec.request_id, 0, [1], STOP)
    assert await client.reserve("other", **key) == spec.request_id
    assert 0 < await client.redis.ttl(f"{client.keys.prefix}:idem::{spec.idempotency}") <= 600


async def test_of_two_with_one_key_the_first_to_be_admitted_goes_on(client: QueueClient) -> None:
    client.with_lifetimes(reservation_ms=1)
    slow, quick = client.spec(), client.spec()
    key: dict[str, Any] = {"idempotency_key": "k", "fingerprint": b"body"}
    await client.reserve(slow.request_id, **key)
    await asyncio.sleep(0.01)
    assert await client.reserve(quick.request_id, **key) == quick.request_id
    await client.queue.admit(slow, cost=8, **key)
    with pytest.raises(Conflict) as caught:
        await client.queue.admit(quick, cost=8, **key)
    assert caught.value.metadata["request_id"] == slow.request_id
    assert await client.queue.depth() == (1, 8)
    assert await client.queue.cancel(slow.request_id) == "CANCELLED"
    assert await client.reserve("third", **key) == "third"


async def test_a_request_deleted_by_hand_does_not_block_others(client: QueueClient) -> None:
    gone, left = await client.admit(timeout_ms=1), await client.admit()
    await client.redis.delete(client.keys.request(gone))
    await asyncio.sleep(0.01)
    await client.queue.sweep()
    await client.scheduler("a")
    assert await client.take("a") == [left]
