"""Requests that would get their first token later than they allow are refused when they come, not ended too late."""

from typing import Any

import pytest

from shared.errors import Overloaded
from tests.support.queue.client import STOP, QueueClient

LIMITS = {"max_requests": 100, "max_tokens": 10_000}


async def pace(client: QueueClient, turn_ms: int) -> None:
    """Lets first tokens have come so many milliseconds after each other."""
    await client.redis.hset(client.keys.meta, "turn_ms", turn_ms)


async def ask(client: QueueClient, **more: Any) -> None:
    rid = client.spec().request_id
    await client.reserve(rid, **LIMITS, **more)
    await client.queue.withdraw(rid)


async def test_a_request_that_allows_less_than_those_before_it_need_is_refused(
    client: QueueClient,
) -> None:
    await pace(client, 1000)
    for _ in range(8):
        await client.admit()
    await ask(client)  # it allows any time
    await ask(client, first_token_timeout_ms=12_100)  # nine turns, and a third of them in reserve
    with pytest.raises(Overloaded, match=r"first token only after 12 s.* is 10 s") as caught:
        await ask(client, first_token_timeout_ms=10_000)
    assert caught.value.reason == "QUEUE_TOO_LONG"
    assert caught.value.metadata["retry_after_s"] == "2"
    await ask(client, queue_timeout_ms=10_700)
    with pytest.raises(Overloaded, match=r"begun only after 11 s.*queue_timeout is 10 s"):
        await ask(client, queue_timeout_ms=10_000)
    assert await client.queue.depth() == (8, 64)  # what was refused has left nothing


async def test_those_with_a_first_token_do_not_count(client: QueueClient) -> None:
    await pace(client, 1000)
    rids = [await client.admit() for _ in range(8)]
    await client.scheduler("a")
    assert await client.take("a") == rids
    with pytest.raises(Overloaded):  # they are taken, and wait for their first tokens
        await ask(client, first_token_timeout_ms=5_000)
    for rid in rids[:6]:
        await client.append("a", rid, 0, [1])
    await pace(client, 1000)
    await ask(client, first_token_timeout_ms=5_000)


async def test_where_nobody_waits_nobody_is_refused(client: QueueClient) -> None:
    await pace(client, 100_000)
    await ask(client, first_token_timeout_ms=1)
    rid = await client.admit()
    with pytest.raises(Overloaded):
        await ask(client, first_token_timeout_ms=1)
    await client.scheduler("a")
    assert await client.take("a") == [rid]
    await client.append("a", rid, 0, [1])
    await ask(client, first_token_timeout_ms=1)


async def test_what_one_tenant_has_waiting_keeps_out_no_other(client: QueueClient) -> None:
    await pace(client, 1000)
    for _ in range(20):
        await client.admit(tenant="flood")
    with pytest.raises(Overloaded):
        await ask(client, tenant="flood", first_token_timeout_ms=10_000)
    await ask(client, tenant="modest", first_token_timeout_ms=10_000)
    for _ in range(3):
        await client.admit(tenant="modest")
    await ask(client, tenant="modest", first_token_timeout_ms=10_000)  # at most three turns of two
    await client.admit(tenant="modest")
    with pytest.raises(Overloaded):
        await ask(client, tenant="modest", first_token_timeout_ms=10_000)
    await client.queue.set_weights({"modest": 4.0})
    await ask(client, tenant="modest", first_token_timeout_ms=10_000)


async def test_batch_work_waits_behind_all(client: QueueClient) -> None:
    await pace(client, 1000)
    for _ in range(8):
        await client.admit(prio="batch")
    await ask(client, first_token_timeout_ms=2_000)
    with pytest.raises(Overloaded):
        await ask(client, prio="batch", first_token_timeout_ms=2_000)


async def test_the_pace_is_that_of_first_tokens(client: QueueClient) -> None:
    """Measured from a first token that leaves others waiting, or from the request that finds nobody waiting."""
    await client.scheduler("a")
    specs = [client.spec() for _ in range(3)]
    for spec in specs:
        await client.reserve(spec.request_id, **LIMITS)
        await client.queue.admit(spec, cost=8)
    await client.take("a")

    async def turn_since(ms_ago: int) -> None:
        await client.redis.hincrby(client.keys.meta, "turn_since_ms", -ms_ago)

    async def turn_ms() -> float:
        return float(await client.redis.hget(client.keys.meta, "turn_ms") or 0)

    await turn_since(60_000)
    await client.append("a", specs[0].request_id, 0, [1])
    assert 60_000 <= await turn_ms() < 120_000
    await pace(client, 1000)
    await turn_since(
        1_000_000
    )  # a pause counts as eight turns, and a sixteenth of that is taken over
    await client.append("a", specs[1].request_id, 0, [1])
    assert await turn_ms() == pytest.approx(1000 + 7000 / 16)
    await client.append("a", specs[2].request_id, 0, [1])
    assert not await client.redis.hexists(client.keys.meta, "turn_since_ms")  # nobody waits
    for spec in specs:
        await client.append("a", spec.request_id, 1, [2], STOP)
    begun = f"{client.keys.prefix}:begun"
    assert not await client.redis.exists(begun)
