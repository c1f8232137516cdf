"""Which tenant is served next: the one that got least, by what its requests really used."""

from collections import Counter

import pytest

from shared.errors import InvalidRequest, Overloaded
from tests.support.queue.client import NO_LOAD, STOP, QueueClient


async def flood(client: QueueClient, tenant: str, count: int = 30, **more: int) -> list[str]:
    return [await client.admit(tenant=tenant, **more) for _ in range(count)]


async def served(client: QueueClient, count: int, tenants: dict[str, str]) -> Counter[str]:
    """Takes one at a time; how many were whose."""
    found = Counter[str]()
    for _ in range(count):
        (rid,) = await client.take("s", 1)
        found[tenants[rid]] += 1
    return found


async def test_a_busy_tenant_does_not_starve_another(client: QueueClient) -> None:
    first = await flood(client, "flood")
    await client.scheduler("s")
    assert await client.take("s", 5) == first[:5]
    modest = await client.admit(tenant="modest")
    assert modest in await client.take("s", 2)


async def test_every_tenth_request_taken_is_batch_work(client: QueueClient) -> None:
    batch = [await client.admit(prio="batch", tenant="b") for _ in range(3)]
    for _ in range(25):
        await client.admit()
    with pytest.raises(InvalidRequest, match="prio"):
        await client.admit(prio="urgent")
    await client.scheduler("s")
    taken = await client.take("s", 20)
    assert [i for i, rid in enumerate(taken) if rid in batch] == [9, 19]
    rest = await client.take("s", 20)
    assert rest[-1] == batch[2] and len(rest) == 8


async def test_priority_orders_the_requests_of_one_tenant_only(client: QueueClient) -> None:
    late, urgent = await client.admit(tenant="a"), await client.admit(tenant="a", advance_us=10**9)
    await client.scheduler("s")
    other = await client.admit(tenant="b")
    taken = await client.take("s", 3)
    assert taken.index(urgent) < taken.index(late)
    assert taken.index(other) < 2


async def test_shares_follow_weights(client: QueueClient) -> None:
    await client.queue.set_weights({"heavy": 3.0})
    tenants = {rid: t for t in ("heavy", "light") for rid in await flood(client, t)}
    await client.scheduler("s")
    assert (await served(client, 20, tenants))["heavy"] == 15
    await client.queue.set_weights({})
    assert abs((await served(client, 20, tenants))["heavy"] - 10) <= 1


async def test_images_count_as_much_as_text(client: QueueClient) -> None:
    tenants = dict.fromkeys(await flood(client, "images", media_cost=24), "images")
    tenants |= dict.fromkeys(await flood(client, "text"), "text")
    await client.scheduler("s")
    assert (await served(client, 20, tenants))["images"] == 4  # 8 tokens against 32


async def test_unused_tokens_are_credited_at_the_end(client: QueueClient) -> None:
    tenants = {rid: t for t in ("short", "long") for rid in await flood(client, t, cost=103)}
    await client.scheduler("s")
    one, two = await client.take("s", 2, tokens=10**6)
    if tenants[one] == "long":
        one, two = two, one
    await client.append("s", two, 0, list(range(100)), STOP)
    await client.append("s", one, 0, [1], STOP)  # charged for 103, used 4
    assert await served(client, 1, tenants) == {"short": 1}
    # From now on less is expected than what a request might use at most: the charge is nearer to the truth.
    assert (await served(client, 4, tenants))["short"] >= 2


async def test_requests_that_go_back_to_the_queue_are_not_charged(client: QueueClient) -> None:
    tenants = {rid: t for t in ("a", "b") for rid in await flood(client, t)}
    await client.scheduler("s")
    for _ in range(5):
        (rid,) = await client.take("s", 1)
        assert tenants[rid] == "a"
        await client.queue.give_back("s", [rid])


async def test_time_away_gives_no_credit_and_a_short_break_forgives_nothing(
    client: QueueClient,
) -> None:
    tenants = dict.fromkeys(await flood(client, "busy", 60), "busy")
    await client.scheduler("s")
    assert await served(client, 20, tenants) == {"busy": 20}
    tenants |= dict.fromkeys(await flood(client, "newcomer", 10), "newcomer")
    assert abs((await served(client, 10, tenants))["newcomer"] - 5) <= 1
    # Sends its next request only when the last was taken, so that it never waits twice.
    await client.redis.flushall()
    await client.scheduler("s")
    tenants = dict.fromkeys(await flood(client, "busy", 60), "busy")
    found = Counter[str]()
    lone = await client.admit(tenant="lone")
    for _ in range(20):
        await client.queue.sweep()
        (rid,) = await client.take("s", 1)
        found["lone" if rid == lone else "busy"] += 1
        if rid == lone:
            lone = await client.admit(tenant="lone")
    assert abs(found["lone"] - 10) <= 1


async def test_no_more_is_taken_than_asked_for(client: QueueClient) -> None:
    rids = [await client.admit(cost=cost) for cost in (50, 8, 8, 30, 8)]
    await client.scheduler("s")
    assert await client.take("s", tokens=20) == rids[:1]  # alone, however large
    assert await client.take("s", tokens=20) == rids[1:3]
    assert await client.take("s", tokens=38) == rids[3:]
    assert await client.take("s") == []


async def test_a_full_queue_gives_the_time_until_a_retry_may_succeed(client: QueueClient) -> None:
    await client.scheduler("s")
    assert await client.take("s") == []
    await client.admit(cost=80)
    await client.queue.renew("s", NO_LOAD, register=False, tokens_per_s=10)
    for cost, seconds in ((25, "1"), (70, "5"), (100, "8")):
        with pytest.raises(Overloaded) as caught:
            await client.reserve(client.spec().request_id, cost=cost)
        assert caught.value.metadata["retry_after_s"] == seconds
    await client.reserve(client.spec().request_id, cost=20)
