"""Redis restarts as another run: what it has lost is restored by schedulers and gateways, and nothing runs twice."""

import asyncio
import contextlib
import shutil
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.launcher.redis.embedded_redis import EmbeddedRedis
from shared.errors import Unavailable
from shared.net import tasks
from shared.queue import AppendCode, Places, RequestSnapshot, TakenRequest, TokenChannel
from shared.queue.registry import Announcement, Directory
from shared.queue.token_log import encode_tokens
from tessera.common.v1.ending_pb2 import Ending
from tests.support.queue.client import NO_LOAD, STOP, QueueClient
from tests.support.queue.lost_tail import go_back_to, keep_copy
from tests.support.queue.members import first_member


async def start_recovery(client: QueueClient) -> None:
    await client.redis.set(f"{client.keys.prefix}:recovery", "1", px=60_000)


async def end_recovery(client: QueueClient) -> None:
    await client.redis.delete(f"{client.keys.prefix}:recovery")


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


async def renewed(client: QueueClient, sid: str) -> bool:
    renewal = await client.queue.renew(sid, NO_LOAD, register=False, tokens_per_s=None)
    return renewal is not None


async def take_one(client: QueueClient, sid: str) -> TakenRequest:
    await client.scheduler(sid)
    taken = await client.queue.take(sid, [Places("", 1, 100)])
    assert taken is not None
    return taken[0]


async def test_everything_is_restored_after_a_complete_loss(client: QueueClient) -> None:
    await client.admit(idempotency_key="k", fingerprint=b"body", tenant="t")
    running = await take_one(client, "a")
    await client.append("a", running.spec.request_id, 0, [1, 2, 3])
    waiting, ended = client.spec(), client.spec()
    for spec in (waiting, ended):
        await client.queue.admit(spec, cost=8)
    depth = await client.queue.depth()
    await client.redis.flushall()
    assert await client.queue.restore([held(running, [1, 2, 3])], "a") == [False]  # nothing to mend
    assert not await renewed(client, "a")
    await start_recovery(client)
    assert await renewed(client, "a")
    assert await client.queue.restore([held(running, [1, 2, 3])], "a") == [True]
    seen = RequestSnapshot(running.spec, (encode_tokens([1, 2]),), (None,), arrived_ms=1)
    gone = RequestSnapshot(ended, (encode_tokens([5]),), (STOP,), arrived_ms=2)
    new = RequestSnapshot(waiting, (encode_tokens([8, 9]),), (None,), arrived_ms=3)
    assert await client.queue.restore([seen, gone, new]) == [True, True, True]
    assert await client.queue.restore([seen, gone, new]) == [True, True, True]
    assert await client.take("a") == []
    await end_recovery(client)
    assert await client.queue.depth() == (depth[0] - 1, depth[1] - 8)
    assert await client.append("a", running.spec.request_id, 3, [4]) == (0, 4)
    assert await client.take("a") == [waiting.request_id]
    assert await client.tokens(waiting.request_id) == [8, 9]
    assert await client.tokens(ended.request_id) == [5]
    assert await client.ending(ended.request_id) == STOP
    again: dict[str, Any] = {"tenant": "t", "idempotency_key": "k", "fingerprint": b"body"}
    assert await client.reserve("other", **again) == running.spec.request_id


async def test_a_follower_lookup_and_leases_stand(client: QueueClient) -> None:
    rid = await client.admit(tenant="t", follow_ms=1)
    await client.queue.follow({rid: 60_000})
    await take_one(client, "a")
    assert await client.queue.abandoned([rid]) == []
    assert await client.queue.expire([rid]) == []
    await client.append("a", rid, 0, [1])
    state = await client.queue.lookup(rid, "t")
    assert state is not None and state.tokens == (1,) and state.attempts == 1
    assert state.arrived_ms <= state.taken_ms <= state.first_token_ms
    assert await client.queue.lookup(rid, "another") is None
    await client.queue.lease_decoder("d", "a")
    assert await client.queue.leases() == {"d": "a"}
    assert await client.queue.sweep() == 0


async def test_each_process_notices_a_restart_of_redis_once(
    private_redis: EmbeddedRedis,
) -> None:
    clients = [QueueClient(private_redis.url) for _ in range(2)]
    received = [
        asyncio.ensure_future(anext(aiter(client.queue.recoveries()))) for client in clients
    ]
    rid = await clients[0].admit()
    await clients[1].scheduler("a")
    assert not any(task.done() for task in received)
    await asyncio.sleep(0.05)
    private_redis.kill()
    with pytest.raises(Unavailable):
        await clients[0].queue.depth()
    await asyncio.to_thread(private_redis.start)
    assert await clients[1].take("a") == []
    await clients[0].queue.depth()
    await asyncio.gather(*received)
    assert await clients[0].redis.pttl(f"{clients[0].keys.prefix}:recovery") > 0
    await end_recovery(clients[0])
    assert await clients[1].take("a") == [rid]
    for client in clients:
        await client.redis.aclose()


async def write_all(client: QueueClient, taken: TakenRequest, count: int) -> None:
    """An owner: logs 0, 1, 2 ... as schedulers do, and goes on from where Redis says the log ends."""
    rid, at = taken.spec.request_id, 0
    while at < count:
        with contextlib.suppress(Unavailable):
            code, length = await client.append("a", rid, at, list(range(at, min(at + 3, count))))
            assert code in (AppendCode.OK, AppendCode.GAP)
            at = length
        await asyncio.sleep(0)


async def test_a_killed_redis_loses_and_doubles_nothing(private_redis: EmbeddedRedis) -> None:
    owner, other = QueueClient(private_redis.url), QueueClient(private_redis.url)
    rids = [await owner.admit(max_tokens=600) for _ in range(8)]
    await owner.scheduler("a")
    taken = await owner.queue.take("a", [Places("", 8, 10**6)])
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
    for client in (owner, other):
        await client.redis.aclose()


async def test_a_redis_that_lost_its_tail_gets_it_back(private_redis: EmbeddedRedis) -> None:
    owner, gateway = QueueClient(private_redis.url), QueueClient(private_redis.url)
    old = await owner.admit(tenant="t")  # running since before
    before = await take_one(owner, "a")
    await owner.append("a", old, 0, [1])
    waits = await owner.admit()  # its taking will be lost
    ends = await owner.admit()  # its ending will be lost
    copy = await keep_copy(private_redis)

    await owner.append("a", old, 1, [2, 3])
    taken = await owner.queue.take("a", [Places("", 2, 100)])
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
    for client in (owner, gateway):
        await client.redis.aclose()


async def test_what_followers_saw_is_not_generated_again(private_redis: EmbeddedRedis) -> None:
    # The owner is dead or frozen; the gateway alone knows how the log went on.
    owner, gateway = QueueClient(private_redis.url), QueueClient(private_redis.url)
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
    for client in (owner, gateway):
        await client.redis.aclose()


async def test_of_two_owners_the_later_one_wins(client: QueueClient) -> None:
    rid = await client.admit()
    first = await take_one(client, "a")
    await client.queue.give_back("a", [rid])
    second = await take_one(client, "b")
    await client.append("b", rid, 0, [1])
    await start_recovery(client)
    assert await client.queue.restore([held(first, [])], "a") == [False]
    # The taking of b is lost.
    await client.redis.hset(
        client.keys.request(rid), mapping={"owner": "a", "own_at": first.own_at}
    )
    assert await client.queue.restore([held(second, [1])], "b") == [True]
    assert await client.append("a", rid, 1, [2]) == (AppendCode.REFUSED, 0)
    # Another history under the same owner: it must begin again from what is logged.
    assert await client.queue.restore([held(second, [8])], "b") == [False]
    await end_recovery(client)
    assert await client.take("b") == [rid]
    # It has ended meanwhile, by a cancel while it waited: no owner brings it back.
    await client.queue.give_back("b", [rid])
    assert await client.queue.cancel(rid) == "CANCELLED"
    await start_recovery(client)
    assert await client.queue.restore([held(second, [1])], "b") == [False]


async def test_a_gateway_puts_back_what_is_missing_also_when_the_recovery_is_over(
    client: QueueClient,
) -> None:
    spec = client.spec()
    await client.queue.admit(spec, cost=8)
    await client.redis.flushall()
    known = RequestSnapshot(spec, (encode_tokens([5]),), (None,), arrived_ms=1)
    assert await client.queue.restore([known]) == [True]
    assert await client.tokens(spec.request_id) == [5]
    longer = RequestSnapshot(spec, (encode_tokens([5, 6]),), (None,), arrived_ms=1)
    assert await client.queue.restore([longer]) == [
        False
    ]  # there it is: its owner may be running it
    await client.scheduler("a")
    assert await client.take("a") == [spec.request_id]


async def test_an_owner_that_comes_late_goes_on_with_what_is_still_its_own(
    client: QueueClient,
) -> None:
    rids = [await client.admit() for _ in range(4)]
    await client.scheduler("a")
    taken = await client.queue.take("a", [Places("", 4, 100)])
    assert taken is not None
    for rid in rids:
        await client.append("a", rid, 0, [1])
    # The replica that became the master has one token of each, and a shorter history of who runs what: the recovery,
    # which another process's connection began, is over.
    await client.scheduler("b")
    keep, given, other, diverged = taken
    await client.queue.give_back("a", [given.spec.request_id])
    await client.redis.hset(client.keys.request(other.spec.request_id), "owner", "b")
    known = [held(keep, [1, 2, 3]), held(given, [1, 2]), held(other, [1, 2]), held(diverged, [8])]
    assert await client.queue.restore(known, "a") == [True, False, False, False]
    rid = keep.spec.request_id
    assert await client.tokens(rid) == [1, 2, 3]
    assert await client.append("a", rid, 3, [4]) == (AppendCode.OK, 4)
    assert await client.take("b") == [given.spec.request_id, diverged.spec.request_id]
    assert await client.append("b", other.spec.request_id, 1, [7]) == (AppendCode.OK, 2)
    assert await client.queue.restore([held(keep, [1, 2, 3, 4], STOP)], "a") == [True]
    assert await client.ending(rid) == STOP


async def test_an_owner_that_redis_has_forgotten_is_listed_again(client: QueueClient) -> None:
    await client.admit()
    taken = await take_one(client, "a")
    await client.redis.flushall()
    client.with_lifetimes(lease_ms=30)
    await start_recovery(client)
    assert await client.queue.restore([held(taken, [1])], "a") == [True]
    await end_recovery(client)
    # It dies before it renews: another one finds it, and takes over.
    renewal = await client.queue.renew("b", NO_LOAD, register=True, tokens_per_s=None)
    assert renewal is not None
    await asyncio.sleep(0.05)
    assert await client.queue.fence("a", renewal.others["a"]) == 1
    assert (await take_one(client, "b")).logs == (encode_tokens([1]),)


async def test_a_process_that_knew_the_old_run_detects_a_complete_loss(
    private_redis: EmbeddedRedis,
) -> None:
    knows = QueueClient(private_redis.url)
    await knows.queue.depth()
    private_redis.kill()
    shutil.rmtree(private_redis.folder)
    await asyncio.to_thread(private_redis.start)
    new = QueueClient(private_redis.url)
    recovery_key = f"{new.keys.prefix}:recovery"
    await new.queue.depth()
    assert not await new.redis.exists(recovery_key)  # an empty database, for all that it knows
    with contextlib.suppress(Unavailable):
        await knows.queue.depth()
    await knows.queue.depth()
    assert await new.redis.exists(recovery_key)
    for client in (knows, new):
        await client.redis.aclose()


async def test_all_loops_of_a_process_say_together_that_redis_is_away(
    private_redis: EmbeddedRedis,
) -> None:
    client = QueueClient(private_redis.url)
    async with (
        Announcement(client.redis, client.keys, "decoder", "i1", "unix:/somewhere"),
        Directory(client.redis, client.keys, "decoder"),
        Directory(client.redis, client.keys, "preprocess"),
    ):
        with capture_logs() as lines:
            private_redis.kill()
            await asyncio.sleep(1.2)  # longer than each of them pauses
            await asyncio.to_thread(private_redis.start)
            async with asyncio.timeout(60):
                while "Redis is back" not in [line["event"] for line in lines]:
                    await asyncio.sleep(0.05)
    await client.redis.aclose()
    said = [line["event"] for line in lines if line["event"].startswith("Redis is ")]
    assert said == ["Redis is away", "Redis is back"]


async def test_services_stay_known_through_a_restart_and_announce_themselves_again(
    private_redis: EmbeddedRedis,
) -> None:
    client = QueueClient(private_redis.url)
    copy = await keep_copy(private_redis)
    instances = f"{client.keys.prefix}:instances:decoder"
    async with (
        Announcement(client.redis, client.keys, "decoder", "i1", "unix:/somewhere"),
        Directory(client.redis, client.keys, "decoder") as directory,
    ):
        member = await first_member(directory)
        changes = asyncio.create_task(directory.changed())
        await go_back_to(private_redis, copy)
        async with asyncio.timeout(60):
            while not await client.redis.exists(instances):
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.6)
        assert not changes.done() and directory.members == (member,)
        changes.cancel()
    await client.redis.aclose()


async def test_a_subscriber_notices_a_restart_too(private_redis: EmbeddedRedis) -> None:
    client = QueueClient(private_redis.url)
    await client.queue.depth()
    recovery = asyncio.ensure_future(anext(aiter(client.queue.recoveries())))
    await asyncio.sleep(0)
    private_redis.kill()
    await asyncio.to_thread(private_redis.start)
    listener = asyncio.ensure_future(anext(TokenChannel(client.redis, client.keys).batches()))
    await recovery
    assert client.queue.restarts == 1
    await tasks.end(listener)
    await client.redis.aclose()


async def test_of_lost_decoders_the_larger_number_counts(client: QueueClient) -> None:
    await client.admit()
    taken = await take_one(client, "a")
    rid = taken.spec.request_id
    for known, there in ((2, 2), (1, 2), (0, 2)):
        await start_recovery(client)
        assert await renewed(client, "a")
        assert await client.queue.restore([replace(held(taken, []), lost_decoders=known)], "a") == [
            True
        ]
        lost_decoders: Any = await client.redis.hget(client.keys.request(rid), "lost_decoders")
        assert int(lost_decoders) == there
    await client.redis.flushall()
    await start_recovery(client)
    assert await renewed(client, "a")
    assert await client.queue.restore([replace(held(taken, []), lost_decoders=2)], "a") == [True]
    await end_recovery(client)
    await client.queue.give_back("a", [rid])
    assert (await take_one(client, "a")).lost_decoders == 2


async def test_what_has_begun_a_request_is_put_back_with_its_log(client: QueueClient) -> None:
    begun, fresh = client.spec(), client.spec()
    first = RequestSnapshot(begun, (encode_tokens([5]),), (None,), arrived_ms=1, content="a1")
    first = replace(first, numerics="n1", is_exact=False)
    known = [
        first,
        replace(first, spec=fresh, logs=(b"",), arrived_ms=2),  # of no log yet
    ]
    await client.scheduler("a")
    assert await client.queue.restore(known) == [True, True]
    assert await client.take("a", content="b2") == [fresh.request_id]
    assert await client.take("a", content="b2") == []
    (taken,) = await client.queue.take("a", [Places("a1", 1, 100)]) or []
    assert (taken.spec.request_id, taken.numerics, taken.is_exact) == (
        begun.request_id,
        "n1",
        False,
    )
    for request_id, is_exact in ((begun.request_id, False), (fresh.request_id, True)):
        state = await client.queue.lookup(request_id, "")
        assert state is not None and state.is_exact == is_exact
