"""Who is served next: the tenant that got least, by what its requests really used."""

from collections import Counter

import pytest

from shared.errors import InvalidRequest, Overloaded
from tests.support.queue_desk import NO_LOAD, STOP, Desk


async def flood(desk: Desk, tenant: str, count: int = 30, **more: int) -> list[str]:
    return [await desk.admit(tenant=tenant, **more) for _ in range(count)]


async def served(desk: Desk, count: int, tenants: dict[str, str]) -> Counter[str]:
    """Takes one at a time; how many were whose."""
    found = Counter[str]()
    for _ in range(count):
        (rid,) = await desk.take("s", 1)
        found[tenants[rid]] += 1
    return found


async def test_a_busy_tenant_does_not_starve_another(desk: Desk) -> None:
    first = await flood(desk, "flood")
    await desk.scheduler("s")
    assert await desk.take("s", 5) == first[:5]
    modest = await desk.admit(tenant="modest")
    assert modest in await desk.take("s", 2)


async def test_batch_work_gets_every_tenth_turn_and_otherwise_waits(desk: Desk) -> None:
    batch = [await desk.admit(prio="batch", tenant="b") for _ in range(3)]
    for _ in range(25):
        await desk.admit()
    with pytest.raises(InvalidRequest, match="prio"):
        await desk.admit(prio="urgent")
    await desk.scheduler("s")
    taken = await desk.take("s", 20)
    assert [i for i, rid in enumerate(taken) if rid in batch] == [9, 19]
    rest = await desk.take("s", 20)
    assert rest[-1] == batch[2] and len(rest) == 8


async def test_priority_orders_the_requests_of_one_tenant_only(desk: Desk) -> None:
    late, urgent = await desk.admit(tenant="a"), await desk.admit(tenant="a", advance_us=10**9)
    await desk.scheduler("s")
    other = await desk.admit(tenant="b")
    taken = await desk.take("s", 3)
    assert taken.index(urgent) < taken.index(late)
    assert taken.index(other) < 2


async def test_shares_follow_weights(desk: Desk) -> None:
    await desk.queue.set_weights({"heavy": 3.0})
    tenants = {rid: t for t in ("heavy", "light") for rid in await flood(desk, t)}
    await desk.scheduler("s")
    assert (await served(desk, 20, tenants))["heavy"] == 15
    await desk.queue.set_weights({})
    assert abs((await served(desk, 20, tenants))["heavy"] - 10) <= 1


async def test_images_count_as_much_as_text(desk: Desk) -> None:
    tenants = dict.fromkeys(await flood(desk, "images", media_cost=24), "images")
    tenants |= dict.fromkeys(await flood(desk, "text"), "text")
    await desk.scheduler("s")
    assert (await served(desk, 20, tenants))["images"] == 4  # 8 tokens against 32


async def test_what_was_not_used_is_given_back_at_the_end(desk: Desk) -> None:
    tenants = {rid: t for t in ("short", "long") for rid in await flood(desk, t, cost=103)}
    await desk.scheduler("s")
    one, two = await desk.take("s", 2, tokens=10**6)
    if tenants[one] == "long":
        one, two = two, one
    await desk.append("s", two, 0, list(range(100)), STOP)
    await desk.append("s", one, 0, [1], STOP)  # charged for 103, used 4
    assert await served(desk, 1, tenants) == {"short": 1}
    # From now on less is expected than what a request might use at most: the charge is nearer to the truth.
    assert (await served(desk, 4, tenants))["short"] >= 2


async def test_what_goes_back_to_the_queue_is_not_charged(desk: Desk) -> None:
    tenants = {rid: t for t in ("a", "b") for rid in await flood(desk, t)}
    await desk.scheduler("s")
    for _ in range(5):
        (rid,) = await desk.take("s", 1)
        assert tenants[rid] == "a"
        await desk.queue.give_back("s", [rid])


async def test_time_away_gives_no_credit_and_a_short_break_forgives_nothing(desk: Desk) -> None:
    tenants = dict.fromkeys(await flood(desk, "busy", 60), "busy")
    await desk.scheduler("s")
    assert await served(desk, 20, tenants) == {"busy": 20}
    tenants |= dict.fromkeys(await flood(desk, "newcomer", 10), "newcomer")
    assert abs((await served(desk, 10, tenants))["newcomer"] - 5) <= 1
    # Sends its next request only when the last was taken, so that it never waits twice.
    await desk.redis.flushall()
    await desk.scheduler("s")
    tenants = dict.fromkeys(await flood(desk, "busy", 60), "busy")
    found = Counter[str]()
    lone = await desk.admit(tenant="lone")
    for _ in range(20):
        await desk.queue.sweep()
        (rid,) = await desk.take("s", 1)
        found["lone" if rid == lone else "busy"] += 1
        if rid == lone:
            lone = await desk.admit(tenant="lone")
    assert abs(found["lone"] - 10) <= 1


async def test_no_more_is_taken_than_there_is_room_for(desk: Desk) -> None:
    rids = [await desk.admit(cost=cost) for cost in (50, 8, 8, 30, 8)]
    await desk.scheduler("s")
    assert await desk.take("s", tokens=20) == rids[:1]  # alone, however large
    assert await desk.take("s", tokens=20) == rids[1:3]
    assert await desk.take("s", tokens=38) == rids[3:]
    assert await desk.take("s") == []


async def test_a_full_queue_says_how_long_it_takes_to_make_room(desk: Desk) -> None:
    await desk.scheduler("s")
    assert await desk.take("s") == []
    await desk.admit(cost=80)
    await desk.queue.renew("s", NO_LOAD, register=False, tokens_per_s=10)
    for cost, seconds in ((25, "1"), (70, "5"), (100, "8")):
        with pytest.raises(Overloaded) as caught:
            await desk.reserve(desk.spec().request_id, cost=cost)
        assert caught.value.metadata["retry_after_s"] == seconds
    await desk.reserve(desk.spec().request_id, cost=20)
