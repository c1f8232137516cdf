"""Requests that have waited longer than the goal for a first token come behind those that have not, and still come."""

import asyncio
from typing import Any

import pytest

from shared.errors import Overloaded
from shared.queue import RequestSnapshot
from tests.support.queue.client import STOP, QueueClient

GOAL_MS = 60_000
LIMITS = {"max_requests": 1000, "max_tokens": 100_000}


@pytest.fixture
async def goal(client: QueueClient) -> QueueClient:
    """The queue with a goal, and a scheduler."""
    client.with_lifetimes(late_after_ms=GOAL_MS)
    await client.scheduler("s")
    return client


async def pass_the_goal(client: QueueClient) -> None:
    """Lets all that wait, and can become late, have waited longer than the goal."""
    key = f"{client.keys.prefix}:goal"
    waiting: Any = await client.redis.zrange(key, 0, -1)
    for rid in waiting:
        await client.redis.zincrby(key, -2 * 1000 * GOAL_MS, rid)


async def many(client: QueueClient, count: int, **more: int | str) -> list[str]:
    return [await client.admit(**more) for _ in range(count)]


async def test_those_that_can_be_in_time_go_first(goal: QueueClient) -> None:
    late = await many(goal, 3)
    await pass_the_goal(goal)
    in_time = await many(goal, 2)
    assert await goal.take("s", 4) == [*in_time, *late[:2]]
    assert await goal.take("s") == late[2:]


async def test_without_a_goal_the_order_is_that_of_arrival(client: QueueClient) -> None:
    await client.scheduler("s")
    early = await many(client, 3)
    await pass_the_goal(client)
    early += await many(client, 2)
    assert await client.take("s") == early


async def test_every_twentieth_is_the_one_that_has_waited_longest(goal: QueueClient) -> None:
    for tenant in ("a", "b"):  # of each tenant, however their turns fall
        late = await many(goal, 3, tenant=tenant)
        await pass_the_goal(goal)
        in_time = await many(goal, 45, tenant=tenant)
        assert await goal.take("s", 10) == in_time[:10]
        taken = await goal.take("s", 35)
        assert [i for i, rid in enumerate(taken, 11) if rid in late] == [20, 40]
        assert [rid for rid in taken if rid in late] == late[:2]
        assert await goal.take("s", 10) == [*in_time[43:], late[2]]


async def test_what_was_taken_before_goes_on_before_all(goal: QueueClient) -> None:
    begun, only_taken, *late = await many(goal, 5)
    await goal.take("s", 2)
    await goal.append("s", begun, 0, [1])
    await pass_the_goal(goal)
    in_time = await many(goal, 30)
    assert await goal.take("s", 19) == in_time[:19]  # the next turn would be a late one's
    await goal.queue.give_back("s", [begun, only_taken])
    await pass_the_goal(goal)
    assert await goal.take("s", 3) == [begun, only_taken, late[0]]


async def test_requests_that_say_how_long_they_wait_keep_their_place(goal: QueueClient) -> None:
    (late,) = await many(goal, 1)
    patient = await many(goal, 1, queue_timeout_ms=60_000)
    patient += await many(goal, 1, first_token_timeout_ms=60_000)
    await pass_the_goal(goal)
    in_time = await many(goal, 1)
    assert await goal.take("s") == [*patient, *in_time, late]


async def test_batch_work_and_priorities_keep_their_order(goal: QueueClient) -> None:
    hour = 3_600_000_000
    batch = await many(goal, 2, prio="batch")
    (after,) = await many(goal, 1, advance_us=-hour)
    (late,) = await many(goal, 1)
    (before,) = await many(goal, 1, advance_us=hour)
    await pass_the_goal(goal)
    batch += await many(goal, 1, prio="batch")
    (in_time,) = await many(goal, 1)
    assert await goal.take("s", 7) == [before, in_time, late, after, *batch]


async def test_one_that_had_begun_where_redis_has_lost_it_is_not_late(goal: QueueClient) -> None:
    """Its gateway puts it back and knows its tokens; Redis had it as one that waits since long."""
    spec = goal.spec()
    arrived_ms = await goal.queue.admit(spec, cost=8)
    (late,) = await many(goal, 1)
    await pass_the_goal(goal)
    assert await goal.take("s", 0) == []  # both are late now
    await goal.redis.set(f"{goal.keys.prefix}:recovery", "x")
    snapshot = RequestSnapshot(spec, (b"\1\0\0\0",), (None,), arrived_ms=arrived_ms)
    assert await goal.queue.restore([snapshot]) == [True]
    await goal.redis.delete(f"{goal.keys.prefix}:recovery")
    in_time = await many(goal, 1)
    assert await goal.take("s") == [spec.request_id, *in_time, late]


async def test_late_ones_delay_no_request_that_says_how_long_it_waits(goal: QueueClient) -> None:
    await goal.redis.hset(goal.keys.meta, "turn_ms", 1000)
    await many(goal, 20)
    rid = goal.spec().request_id
    with pytest.raises(Overloaded):
        await goal.reserve(rid, **LIMITS, first_token_timeout_ms=10_000)
    await pass_the_goal(goal)
    assert await goal.take("s", 0) == []
    await goal.reserve(rid, **LIMITS, first_token_timeout_ms=10_000)
    await goal.queue.withdraw(rid)


async def test_late_ones_end_and_leave_nothing(goal: QueueClient) -> None:
    rids = await many(goal, 3)
    timed = await many(goal, 1, timeout_ms=1)
    await pass_the_goal(goal)
    assert await goal.take("s", 0) == []
    await goal.queue.cancel(rids[0], "")
    await asyncio.sleep(0.01)
    await goal.queue.sweep()
    ended = await goal.ending(timed[0])
    assert ended is not None and ended.failure.reason == "REQUEST_TIMEOUT"
    assert await goal.take("s") == rids[1:]
    for rid in rids[1:]:
        await goal.append("s", rid, 0, [1], STOP)
    assert await goal.queue.depth() == (0, 0)
    left = [key async for key in goal.redis.scan_iter(f"{goal.keys.prefix}:*")]
    names = {key.decode().removeprefix(f"{goal.keys.prefix}:").partition(":")[0] for key in left}
    assert not names & {"w", "late", "goal", "turns", "tenants", "due"}
