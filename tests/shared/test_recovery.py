"""Redis comes back as another run: what it has lost is put back by those who know it, and nothing runs twice."""

import asyncio
import contextlib
import shutil
from dataclasses import replace
from typing import Any

import pytest

from services.launcher.redis.embedded_redis import EmbeddedRedis
from shared.errors import Unavailable
from shared.net import tasks
from shared.net.registry import Announcement, Directory
from shared.queue import AppendCode, RequestSnapshot, TakenRequest, TokenChannel
from shared.queue.token_log import encode_tokens
from tessera.common.v1.ending_pb2 import Ending
from tests.support.lost_tail import go_back_to, keep_copy
from tests.support.queue_desk import NO_LOAD, STOP, Desk


async def start_recovery(desk: Desk) -> None:
    await desk.redis.set(f"{desk.keys.prefix}:recovery", "1", px=60_000)


async def end_recovery(desk: Desk) -> None:
    await desk.redis.delete(f"{desk.keys.prefix}:recovery")


def held(taken: TakenRequest, tokens: list[int], ending: Ending | None = None) -> RequestSnapshot:
    return RequestSnapshot(
        spec=taken.spec,
        logs=(encode_tokens(tokens),),
        endings=(ending,),
        own_at=taken.own_at,
        arrived_ms=taken.arrived_ms,
        prio=taken.prio,
        rank=taken.rank,
    )


async def renewed(desk: Desk, sid: str) -> bool:
    renewal = await desk.queue.renew(sid, NO_LOAD, register=False, tokens_per_s=None)
    return renewal is not None


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
    assert not await renewed(desk, "a")
    await start_recovery(desk)
    assert await renewed(desk, "a")
    assert await desk.queue.restore([held(running, [1, 2, 3])], "a") == [True]
    seen = RequestSnapshot(running.spec, (encode_tokens([1, 2]),), (None,), arrived_ms=1)
    gone = RequestSnapshot(ended, (encode_tokens([5]),), (STOP,), arrived_ms=2)
    new = RequestSnapshot(waiting, (encode_tokens([8, 9]),), (None,), arrived_ms=3)
    assert await desk.queue.restore([seen, gone, new]) == [True, True, True]
    assert await desk.queue.restore([seen, gone, new]) == [True, True, True]
    assert await desk.take("a") == []
    await end_recovery(desk)
    assert await desk.queue.depth() == (depth[0] - 1, depth[1] - 8)
    assert await desk.append("a", running.spec.request_id, 3, [4]) == (0, 4)
    assert await desk.take("a") == [waiting.request_id]
    assert await desk.tokens(waiting.request_id) == [8, 9]
    assert await desk.tokens(ended.request_id) == [5]
    assert await desk.ending(ended.request_id) == STOP
    again: dict[str, Any] = {"tenant": "t", "idempotency_key": "k", "fingerprint": b"body"}
    assert await desk.reserve("other", **again) == running.spec.request_id


async def test_a_follower_lookup_and_leases_stand(desk: Desk) -> None:
    rid = await desk.admit(tenant="t", follow_ms=1)
    await desk.queue.follow({rid: 60_000})
    await take_one(desk, "a")
    assert await desk.queue.abandoned([rid]) == []
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
    heard = [asyncio.ensure_future(anext(aiter(desk.queue.recoveries()))) for desk in desks]
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
    assert await desks[0].redis.pttl(f"{desks[0].keys.prefix}:recovery") > 0
    await end_recovery(desks[0])
    assert await desks[1].take("a") == [rid]
    for desk in desks:
        await desk.redis.aclose()


async def write_all(desk: Desk, taken: TakenRequest, count: int) -> None:
    """An owner: logs 0, 1, 2 ... as schedulers do, and goes on from where Redis says the log ends."""
    rid, at = taken.spec.request_id, 0
    while at < count:
        with contextlib.suppress(Unavailable):
            code, length = await desk.append("a", rid, at, list(range(at, min(at + 3, count))))
            assert code in (AppendCode.OK, AppendCode.GAP)
            at = length
        await asyncio.sleep(0)


async def test_a_killed_redis_loses_and_doubles_nothing(private_redis: EmbeddedRedis) -> None:
    owner, other = Desk(private_redis.url), Desk(private_redis.url)
    rids = [await owner.admit(max_tokens=600) for _ in range(8)]
    await owner.scheduler("a")
    taken = await owner.queue.take("a", max_requests=8, max_tokens=10**6)
    assert taken is not None
    writers = [asyncio.create_task(write_all(owner, one, 600)) for one in taken]
    for _ in range(2):
        while len(await other.tokens(rids[-1])) in (0, 600):
            await asyncio.sleep(0)
        private_redis.kill()
        await asyncio.sleep(0.02)
        await asyncio.to_thread(private_redis.start)
        # Everything acknowledged is there; what others know of it changes nothing.
        seen = RequestSnapshot(taken[0].spec, (encode_tokens([0, 1]),), (None,), arrived_ms=1)
        assert await other.queue.restore([seen]) == [True]
    await asyncio.gather(*writers)
    for rid in rids:
        assert await other.tokens(rid) == list(range(600))
    assert (await other.queue.depth())[0] == 8
    for desk in (owner, other):
        await desk.redis.aclose()


async def test_a_redis_that_lost_its_tail_gets_it_back(private_redis: EmbeddedRedis) -> None:
    owner, gateway = Desk(private_redis.url), Desk(private_redis.url)
    old = await owner.admit(tenant="t")  # running since before
    before = await take_one(owner, "a")
    await owner.append("a", old, 0, [1])
    waits = await owner.admit()  # its taking will be lost
    ends = await owner.admit()  # its ending will be lost
    copy = await keep_copy(private_redis)

    await owner.append("a", old, 1, [2, 3])
    taken = await owner.queue.take("a", max_requests=2, max_tokens=100)
    assert taken is not None and [t.spec.request_id for t in taken] == [waits, ends]
    await owner.append("a", waits, 0, [4])
    await owner.append("a", ends, 0, [5, 6], STOP)
    unknown = owner.spec()  # its admission will be lost
    arrived_ms = await gateway.queue.admit(unknown, cost=8)
    nobodys = await owner.admit()  # lost with everybody who knew of it
    await owner.queue.cancel(nobodys)
    depth = await gateway.queue.depth()

    await go_back_to(private_redis, copy)
    assert await owner.take("a") == []
    assert await owner.tokens(old) == [1] and await owner.ending(ends) is None
    # The owner goes on meanwhile: its log is longer than what it says that it holds.
    assert await owner.append("a", old, 1, [2, 3, 7]) == (AppendCode.OK, 4)
    knows = [held(before, [1, 2, 3]), held(taken[0], [4]), held(taken[1], [5, 6], STOP)]
    assert await owner.queue.restore(knows, "a") == [True] * 3
    seen = RequestSnapshot(unknown, (b"",), (None,), arrived_ms=arrived_ms)
    assert await gateway.queue.restore([seen]) == [True]
    assert await gateway.queue.depth() == depth
    await end_recovery(owner)
    assert await owner.take("a") == [unknown.request_id]
    for rid, at in ((old, 4), (waits, 1), (unknown.request_id, 0)):
        assert await owner.append("a", rid, at, [9], STOP) == (AppendCode.OK, at + 1)
    assert await owner.tokens(old) == [1, 2, 3, 7, 9]
    assert await owner.tokens(waits) == [4, 9]
    assert await owner.tokens(ends) == [5, 6] and await owner.ending(ends) == STOP
    assert await owner.queue.depth() == (0, 0)
    for desk in (owner, gateway):
        await desk.redis.aclose()


async def test_what_followers_saw_is_not_generated_again(private_redis: EmbeddedRedis) -> None:
    # The owner is dead or frozen; the gateway alone knows how the log went on.
    owner, gateway = Desk(private_redis.url), Desk(private_redis.url)
    rid = await owner.admit(n=2)
    copy = await keep_copy(private_redis)
    taken = await take_one(owner, "a")
    await owner.append("a", rid, 0, [1, 2, 3], STOP)
    await go_back_to(private_redis, copy)
    logs = (encode_tokens([1, 2, 3]), encode_tokens([7]))
    assert await gateway.queue.restore([RequestSnapshot(taken.spec, logs, (STOP, None))]) == [True]
    wrong = (encode_tokens([1, 9]), b"")
    assert await gateway.queue.restore([RequestSnapshot(taken.spec, wrong, (None, None))]) == [
        False
    ]
    await end_recovery(gateway)
    again = await take_one(gateway, "b")
    assert again.logs == logs and again.endings == (STOP, None)
    assert await owner.append("a", rid, 3, [4]) == (AppendCode.REFUSED, 0)
    for desk in (owner, gateway):
        await desk.redis.aclose()


async def test_of_two_owners_the_later_taking_wins(desk: Desk) -> None:
    rid = await desk.admit()
    first = await take_one(desk, "a")
    await desk.queue.give_back("a", [rid])
    second = await take_one(desk, "b")
    await desk.append("b", rid, 0, [1])
    await start_recovery(desk)
    assert await desk.queue.restore([held(first, [])], "a") == [False]
    # The taking of b is lost.
    await desk.redis.hset(desk.keys.request(rid), mapping={"owner": "a", "own_at": first.own_at})
    assert await desk.queue.restore([held(second, [1])], "b") == [True]
    assert await desk.append("a", rid, 1, [2]) == (AppendCode.REFUSED, 0)
    # Another history under the same owner: it must begin again from what is logged.
    assert await desk.queue.restore([held(second, [8])], "b") == [False]
    await end_recovery(desk)
    assert await desk.take("b") == [rid]
    # It has ended meanwhile, by a cancel while it waited: no owner brings it back.
    await desk.queue.give_back("b", [rid])
    assert await desk.queue.cancel(rid) == "CANCELLED"
    await start_recovery(desk)
    assert await desk.queue.restore([held(second, [1])], "b") == [False]


async def test_a_gateway_puts_back_what_is_missing_also_when_the_recovery_is_over(
    desk: Desk,
) -> None:
    spec = desk.spec()
    await desk.queue.admit(spec, cost=8)
    await desk.redis.flushall()
    known = RequestSnapshot(spec, (encode_tokens([5]),), (None,), arrived_ms=1)
    assert await desk.queue.restore([known]) == [True]
    assert await desk.tokens(spec.request_id) == [5]
    longer = RequestSnapshot(spec, (encode_tokens([5, 6]),), (None,), arrived_ms=1)
    assert await desk.queue.restore([longer]) == [False]  # there it is: its owner may be running it
    await desk.scheduler("a")
    assert await desk.take("a") == [spec.request_id]


async def test_an_owner_that_redis_has_forgotten_is_listed_again(desk: Desk) -> None:
    await desk.admit()
    taken = await take_one(desk, "a")
    await desk.redis.flushall()
    desk.with_lifetimes(lease_ms=30)
    await start_recovery(desk)
    assert await desk.queue.restore([held(taken, [1])], "a") == [True]
    await end_recovery(desk)
    # It dies before it renews: another one finds it, and takes over.
    renewal = await desk.queue.renew("b", NO_LOAD, register=True, tokens_per_s=None)
    assert renewal is not None
    await asyncio.sleep(0.05)
    assert await desk.queue.fence("a", renewal.others["a"]) == 1
    assert (await take_one(desk, "b")).logs == (encode_tokens([1]),)


async def test_who_alone_had_known_redis_tells_that_all_is_lost(
    private_redis: EmbeddedRedis,
) -> None:
    knows = Desk(private_redis.url)
    await knows.queue.depth()
    private_redis.kill()
    shutil.rmtree(private_redis.folder)
    await asyncio.to_thread(private_redis.start)
    new = Desk(private_redis.url)
    recovery_key = f"{new.keys.prefix}:recovery"
    await new.queue.depth()
    assert not await new.redis.exists(recovery_key)  # an empty database, for all that it knows
    with contextlib.suppress(Unavailable):
        await knows.queue.depth()
    await knows.queue.depth()
    assert await new.redis.exists(recovery_key)
    for desk in (knows, new):
        await desk.redis.aclose()


async def test_rooms_are_known_through_a_restart_and_announce_themselves_again(
    private_redis: EmbeddedRedis,
) -> None:
    desk = Desk(private_redis.url)
    copy = await keep_copy(private_redis)
    rooms = f"{desk.keys.prefix}:instances:decoder"
    async with (
        Announcement(desk.redis, desk.keys, "decoder", "i1", "unix:/somewhere"),
        Directory(desk.redis, desk.keys, "decoder") as directory,
    ):
        member = await directory.wait_for_one(5)
        changes = asyncio.create_task(directory.changed())
        await go_back_to(private_redis, copy)
        async with asyncio.timeout(30):
            while not await desk.redis.exists(rooms):
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.6)
        assert not changes.done() and directory.members == (member,)
        changes.cancel()
    await desk.redis.aclose()


async def test_who_only_listens_notices_a_restart_too(private_redis: EmbeddedRedis) -> None:
    desk = Desk(private_redis.url)
    await desk.queue.depth()
    recovery = asyncio.ensure_future(anext(aiter(desk.queue.recoveries())))
    await asyncio.sleep(0)
    private_redis.kill()
    await asyncio.to_thread(private_redis.start)
    listener = asyncio.ensure_future(anext(TokenChannel(desk.redis, desk.keys).batches()))
    await recovery
    assert desk.queue.restarts == 1
    await tasks.end(listener)
    await desk.redis.aclose()


async def test_of_lost_decoders_the_larger_number_counts(desk: Desk) -> None:
    await desk.admit()
    taken = await take_one(desk, "a")
    rid = taken.spec.request_id
    for known, there in ((2, 2), (1, 2), (0, 2)):
        await start_recovery(desk)
        assert await renewed(desk, "a")
        assert await desk.queue.restore([replace(held(taken, []), deaths=known)], "a") == [True]
        deaths: Any = await desk.redis.hget(desk.keys.request(rid), "deaths")
        assert int(deaths) == there
    await desk.redis.flushall()
    await start_recovery(desk)
    assert await renewed(desk, "a")
    assert await desk.queue.restore([replace(held(taken, []), deaths=2)], "a") == [True]
    await end_recovery(desk)
    await desk.queue.give_back("a", [rid])
    assert (await take_one(desk, "a")).deaths == 2
