"""The queue's scripts on a real Redis: who may write, what a request costs, and that each ends once."""

import asyncio
from typing import Any

import pytest

from shared.errors import Conflict, Overloaded
from shared.queue import Append, AppendCode, ControlChannel, Places, token_log
from shared.queue.log_event import Origin
from shared.queue.registry import Announcement, Directory
from shared.queue.scripts import Scripts
from tessera.common.v1 import ending_pb2
from tests.support.queue.client import NO_LOAD, STOP, QueueClient
from tests.support.queue.listening import listening
from tests.support.queue.members import first_member
from tests.support.queue.records import logprob_record


async def test_a_reservation_counts_until_it_is_withdrawn_or_admitted(client: QueueClient) -> None:
    spec = client.spec()
    assert await client.reserve(spec.request_id, cost=50) == spec.request_id
    assert await client.queue.depth() == (1, 50)
    await client.queue.admit(spec, cost=8)
    assert await client.queue.depth() == (1, 8)
    other = client.spec()
    await client.reserve(other.request_id)
    await client.queue.withdraw(other.request_id)
    assert await client.queue.depth() == (1, 8)


async def test_a_full_queue_names_the_limit_and_the_retry_delay(client: QueueClient) -> None:
    for _ in range(3):
        await client.reserve(client.spec().request_id, cost=30)
    with pytest.raises(Overloaded, match=r"requests: limit 3") as caught:
        await client.reserve(client.spec().request_id)
    assert int(caught.value.metadata["retry_after_s"]) >= 1
    await client.scheduler("s")
    await client.queue.renew("s", NO_LOAD, register=False, tokens_per_s=5)
    with pytest.raises(Overloaded, match=r"tokens: limit 100") as caught:
        await client.reserve(client.spec().request_id, cost=30, max_requests=10)
    assert caught.value.metadata["retry_after_s"] == "4"


async def test_a_request_larger_than_the_limit_may_run_alone(client: QueueClient) -> None:
    await client.reserve(client.spec().request_id, cost=1000)
    assert await client.queue.depth() == (1, 1000)


async def test_an_expired_reservation_is_freed(client: QueueClient) -> None:
    client.with_lifetimes(reservation_ms=1)
    for _ in range(3):
        await client.reserve(client.spec().request_id)
    await asyncio.sleep(0.01)
    await client.reserve(client.spec().request_id)
    assert await client.queue.depth() == (1, 10)


async def test_an_idempotency_key_finds_the_running_request(client: QueueClient) -> None:
    spec = client.spec()
    key: dict[str, Any] = {"idempotency_key": "k", "fingerprint": b"body"}
    await client.reserve(spec.request_id, **key)
    assert await client.reserve("other", **key) == spec.request_id
    with pytest.raises(Conflict):
        await client.reserve("other", idempotency_key="k", fingerprint=b"another body")
    await client.queue.admit(spec, cost=8, idempotency_key="k")
    await client.queue.cancel(spec.request_id)
    assert await client.reserve("other", **key) == "other"


async def test_only_the_owner_appends_and_without_gaps(client: QueueClient) -> None:
    rid = await client.admit()
    await client.scheduler("a")
    assert await client.take("a") == [rid]
    assert await client.append("a", rid, 2, [3]) == (AppendCode.GAP, 0)
    assert await client.append("a", rid, 0, [1, 2]) == (AppendCode.OK, 2)
    assert await client.append("b", rid, 2, [3]) == (AppendCode.REFUSED, 0)
    assert await client.append("a", rid, 1, [2, 3]) == (AppendCode.OK, 3)
    assert await client.append("a", rid, 5, [6]) == (AppendCode.GAP, 3)
    assert await client.append("a", rid, 3, [4], STOP) == (AppendCode.OK, 4)
    assert await client.append("a", rid, 4, [5]) == (AppendCode.REFUSED, 0)
    found = await client.queue.read(rid, 1)
    assert found is not None and found.state == "ended"
    assert token_log.decode_tokens(found.records[0]) == [1, 2, 3, 4]
    assert found.endings == (STOP,)
    assert found.head.request_id == rid and not found.head.prompt and found.prompt_tokens == 3
    assert await client.queue.depth() == (0, 0)
    later = await client.queue.read(rid, 1, after=[3])
    assert later is not None and token_log.decode_tokens(later.records[0]) == [4]


async def test_each_choice_ends_once_and_the_request_with_the_last(client: QueueClient) -> None:
    rid = await client.admit(n=2)
    await client.scheduler("a")
    assert await client.take("a") == [rid]
    records = token_log.encode_tokens([1, 2])

    async def append(*appends: Append) -> list[tuple[AppendCode, int]]:
        return [(a.code, a.length) for a in await client.queue.append("a", appends)]

    prompt = b"p" * 24
    assert (
        await append(
            Append(rid, -1, 0, 12, prompt),
            Append(rid, 1, 0, 4, records, STOP),
            Append(rid, 0, 0, 4, records),
        )
        == [(AppendCode.OK, 2)] * 3
    )
    # Sent twice, because it was not known whether it had arrived: nothing happens and nobody is told.
    assert await append(Append(rid, 1, 0, 4, records, STOP)) == [(AppendCode.OK, 2)]
    assert await append(Append(rid, -1, 1, 12, prompt)) == [(AppendCode.OK, 3)]
    assert await append(Append(rid, 0, 9, 4, records), Append(rid, 0, 2, 4, records)) == [
        (AppendCode.GAP, 2),
        (AppendCode.OK, 4),
    ]
    await client.queue.give_back("a", [rid])
    taken = await client.queue.take("a", [Places("", 1, 1000)])
    assert taken is not None
    assert taken[0].prompt_log == b"p" * 36 and taken[0].prio == "interactive"
    assert taken[0].logs == (records * 2, records) and taken[0].endings == (None, STOP)
    assert await append(Append(rid, 0, 4, 4, b"", STOP)) == [(AppendCode.OK, 4)]
    assert await append(Append(rid, 0, 4, 4, records)) == [(AppendCode.REFUSED, 0)]
    assert await client.queue.depth() == (0, 0)
    assert await client.redis.ttl(client.keys.log(rid, -1)) > 0


async def test_a_request_goes_back_to_the_head_with_its_log(client: QueueClient) -> None:
    first, second = await client.admit(), await client.admit()
    await client.scheduler("a")
    assert await client.take("a", 1) == [first]
    await client.append("a", first, 0, [1, 2])
    assert await client.queue.give_back("a", [first, second]) == 1
    await client.scheduler("b")
    taken = await client.queue.take("b", [Places("", 2, 1000)])
    assert taken is not None and [t.spec.request_id for t in taken] == [first, second]
    assert token_log.decode_tokens(taken[0].logs[0]) == [1, 2]


async def test_decoders_lost_with_a_request_stay_counted(client: QueueClient) -> None:
    rid, other = await client.admit(), await client.admit()

    async def lost_decoders() -> list[int]:
        taken = await client.queue.take("a", [Places("", 2, 1000)])
        assert taken is not None
        return [t.lost_decoders for t in taken]

    await client.scheduler("a")
    assert await lost_decoders() == [0, 0]
    await client.queue.give_back("a", [rid, other], {rid: 1})
    assert await lost_decoders() == [1, 0]
    await client.queue.give_back("a", [rid, other])  # nothing was lost: a drain
    assert await lost_decoders() == [1, 0]
    await client.queue.give_back("a", [rid, other], {rid: 2, other: 1})
    assert await lost_decoders() == [2, 1]


async def test_cancel_ends_waiting_requests_and_flags_running_ones(client: QueueClient) -> None:
    waiting = await client.admit(tenant="t")
    async with listening(client.redis, client.keys) as received:
        assert await client.queue.cancel(waiting, "somebody else") == "UNKNOWN"
        assert await client.queue.cancel(waiting, "t") == "CANCELLED"
        assert await client.queue.cancel(waiting, "t") == "ENDED"
        (event,) = await received.ended(waiting)
    assert received.events == [event]
    assert event.ending.reason == ending_pb2.FINISH_REASON_CANCELLED
    running = await client.admit()
    await client.scheduler("a")
    assert await client.take("a") == [running]
    control: Any = aiter(ControlChannel(client.redis, client.keys).messages())
    told = asyncio.create_task(anext(control))
    while not told.done():  # until it listens
        await client.redis.publish(client.keys.control_channel, b"q")
        await asyncio.wait([told], timeout=0.05)
    assert await client.queue.cancel(running) == "FLAGGED"
    while (cancelled := await anext(control)) is None:
        pass
    assert cancelled == running
    await control.aclose()
    assert await client.queue.abandoned([running]) == [running]
    assert await client.append("a", running, 0, [1]) == (AppendCode.CANCEL, 1)
    assert await client.queue.give_back("a", [running]) == 1
    found = await client.queue.read(running, 1)
    assert found is not None and found.endings[0] is not None
    assert found.endings[0].reason == ending_pb2.FINISH_REASON_CANCELLED


async def test_a_dead_scheduler_is_fenced_only_after_its_deadline(client: QueueClient) -> None:
    client.with_lifetimes(lease_ms=60_000)
    rid = await client.admit()
    await client.scheduler("dead")
    assert await client.take("dead") == [rid]
    renewal = await client.queue.renew("live", NO_LOAD, register=True, tokens_per_s=None)
    assert renewal is not None
    deadline = renewal.others["dead"]
    assert await client.queue.fence("dead", deadline) == -1
    past = deadline - 120_000
    await client.redis.zadd(f"{client.keys.prefix}:scheds", {"dead": past})
    assert await client.queue.fence("dead", past - 1) == -1
    assert await client.queue.fence("dead", past) == 1
    assert await client.queue.renew("dead", NO_LOAD, register=False, tokens_per_s=None) is None
    assert await client.queue.take("dead", [Places("", 1, 100)]) is None
    await client.scheduler("live")
    assert await client.take("live") == [rid]
    assert await client.append("dead", rid, 0, [1]) == (AppendCode.REFUSED, 0)


async def test_nothing_is_taken_or_fenced_while_redis_recovers(client: QueueClient) -> None:
    await client.admit()
    await client.scheduler("a")
    await client.redis.set(f"{client.keys.prefix}:recovery", "1", px=60_000)
    assert await client.take("a") == []
    assert await client.queue.lease_decoder("d", "a") == 0
    assert await client.queue.fence("a", 0) == -1


async def test_decoder_leases_grow_and_belong_to_one_live_scheduler(client: QueueClient) -> None:
    client.with_lifetimes(lease_ms=60_000)
    await client.scheduler("a")
    first = await client.queue.lease_decoder("d", "a")
    assert await client.queue.lease_decoder("d", "b") == 0
    await client.queue.free_decoder("d", "b")
    assert await client.queue.lease_decoder("d", "b") == 0
    await client.queue.free_decoder("d", "a")
    second = await client.queue.lease_decoder("d", "b")
    assert second > first > 0


async def test_the_registry_lists_live_instances(client: QueueClient) -> None:
    member = ("decoder", "i1", "unix:/somewhere")
    async with Directory(client.redis, client.keys, "decoder") as directory:
        assert directory.members == ()
        async with Announcement(client.redis, client.keys, *member):
            found = await first_member(directory)
            assert (found.instance_id, found.address) == member[1:]
            assert directory.pick(b"digest") == [found]
        async with asyncio.timeout(60):
            while directory.members:
                await directory.changed()


def test_log_records_with_logprobs_have_a_fixed_size() -> None:
    record = logprob_record(7, [7, 8], [-0.5, -1.5])
    assert len(record) == token_log.stride(1)
    assert token_log.decode_tokens(record * 3 + record[:5], token_log.stride(1)) == [7, 7, 7]


async def test_a_request_is_taken_for_the_weights_that_it_has_begun_with(
    client: QueueClient,
) -> None:
    rids = [await client.admit(tenant=t, cost=8) for t in ("x", "y") for _ in range(80)]
    await client.scheduler("a")
    # The first hundred have begun with the old weights; their scheduler gives them back.
    assert len(await client.take("a", 100, 10**6, content="01d")) == 100
    for rid in sorted(taken := await client.queue.owned("a")):
        record = Append(rid, 0, 0, 4, token_log.encode_tokens([7]), origin=Origin("01d"))
        await client.queue.append("a", [record])
    await client.queue.give_back("a", taken)
    # Whoever has the new ones finds what is new behind all of them, or nothing; nothing is taken twice.
    found = await client.take("a", 200, 10**6, content="2e3")
    assert not set(found) & set(taken)
    assert sorted(await client.take("a", 200, 10**6, content="01d")) == sorted(
        {*taken, *rids} - set(found)
    )


async def test_a_request_keeps_what_it_was_begun_in_and_whether_it_is_exact(
    client: QueueClient,
) -> None:
    rid = await client.admit()
    await client.scheduler("a")
    await client.take("a")

    async def append(start: int, records: bytes, origin: Origin) -> None:
        await client.queue.append("a", [Append(rid, 0, start, 4, records, origin=origin)])

    async def found() -> tuple[str, bool, bool]:
        state = await client.queue.lookup(rid, "")
        (delta,) = await client.queue.read_deltas([(rid, 0, 0)])
        assert state is not None and delta is not None
        return delta.numerics, delta.is_exact, state.is_exact

    assert await found() == ("", True, True)
    await append(0, token_log.encode_tokens([7]), Origin("01d", "n1"))
    assert await found() == ("n1", True, True)
    # What is there already, or nothing, changes nothing.
    await append(0, token_log.encode_tokens([7]), Origin("01d", "n2", is_exact=False))
    await append(1, b"", Origin("01d", "n2", is_exact=False))
    assert await found() == ("n1", True, True)
    await append(1, token_log.encode_tokens([8]), Origin("01d", "n1", is_exact=False))
    await append(2, token_log.encode_tokens([9]), Origin("01d", "n1"))
    assert await found() == ("n1", False, False)
    await client.queue.give_back("a", [rid])
    (taken,) = await client.queue.take("a", [Places("01d", 1, 100)]) or []
    assert (taken.numerics, taken.is_exact) == ("n1", False)


async def test_a_decoder_that_no_scheduler_binds_keeps_no_request_from_the_others(
    client: QueueClient,
) -> None:
    """As another model under the name of the one that is served."""
    scripts = Scripts(client.redis, client.keys.prefix)

    async def announce(decoder: str, content: str, loaded_ms_ago: int) -> None:
        words = (f"unix:/{decoder}", 60_000, 60_000, "", content, loaded_ms_ago)
        await scripts.call("announce", "decoder", decoder, *words)

    async def bound(*contents: str) -> None:
        await client.queue.renew("a", NO_LOAD, register=False, tokens_per_s=None, contents=contents)
        await client.queue.sweep()

    async def taken_by(content: str, other: str) -> bool:
        """Whether a new request is for decoders with `content`, and not for those with `other`."""
        rid = await client.admit()
        return await client.take("a", content=other) == [] and (
            await client.take("a", content=content) == [rid]
        )

    await client.scheduler("a")
    await announce("d1", "01", 1000)
    await bound("01")
    await announce("d2", "02", 0)
    assert await taken_by("01", "02")
    await bound("01")
    assert await taken_by("01", "02")
    await bound("01", "02")
    assert await taken_by("02", "01")
