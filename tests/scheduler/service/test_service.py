"""The whole scheduler process against a real Redis and a decoder that speaks the real step stream."""

import asyncio
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.scheduler.server import FENCED
from shared.net.channels import open_channel
from shared.queue import Places, token_log
from shared.queue.keys import new_instance_id
from shared.text.text_fold import TokenBytes
from tessera.common.v1 import ending_pb2
from tessera.scheduler.v1.scheduler_pb2 import GetLoadRequest, GetLoadResponse
from tessera.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub
from tests.support.arithmetic.model import generate
from tests.support.queue.listening import listening
from tests.support.scheduler_bench import Bench


async def test_requests_are_taken_run_and_logged(bench: Bench) -> None:
    await bench.decoder()
    bench.scheduler()
    rids = [await bench.ask([i + 1, 2, 3] * (i + 1), max_tokens=5 + i) for i in range(30)]
    for i, rid in enumerate(rids):
        tokens, ending = await bench.answer(rid)
        assert tokens == generate([i + 1, 2, 3] * (i + 1), 5 + i)
        assert ending.reason == ending_pb2.FINISH_REASON_LENGTH
    assert await bench.queue.depth() == (0, 0)


async def test_the_token_channel_carries_what_the_log_holds(bench: Bench) -> None:
    await bench.decoder()
    async with listening(bench.redis, bench.keys) as received:
        bench.scheduler()
        rid = await bench.ask([1, 2, 3], max_tokens=20)
        tokens, _ = await bench.answer(rid)
        events = await received.ended(rid)
    assert [e.start for e in events] == list(range(20))
    assert [t for e in events for t in token_log.decode_tokens(e.records)] == tokens
    assert [e.HasField("ending") for e in events] == [False] * 19 + [True]
    assert received.events == events


async def test_stop_strings_and_stop_ids_end_where_they_should(bench: Bench) -> None:
    await bench.decoder()
    bench.scheduler()
    table = TokenBytes.from_tokenizer_json(bench.model / "tokenizer.json")
    prompt = [7, 8, 9]
    expected = generate(prompt, 60)
    text = [table.shown_pieces[t] for t in expected]
    word = (text[10] + text[11]).decode()
    first = b"".join(text).find(word.encode())
    rid = await bench.ask(prompt, max_tokens=60, stop=[word])
    tokens, ending = await bench.answer(rid)
    assert ending.reason == ending_pb2.FINISH_REASON_STOP and ending.stop == word
    kept = b"".join(table.shown_pieces[t] for t in tokens)
    assert kept[: len(kept) - ending.cut] == b"".join(text)[:first]
    rid = await bench.ask(prompt, max_tokens=60, stop_token_ids=[expected[5]])
    tokens, ending = await bench.answer(rid)
    assert tokens == expected[: expected.index(expected[5]) + 1]
    assert ending.stop_token_id == expected[5]


async def test_cancelling_a_running_request_ends_it_and_frees_its_slot(bench: Bench) -> None:
    decoder, _ = await bench.decoder(delay_s=0.01)
    bench.scheduler()
    rid = await bench.ask([1, 2, 3], max_tokens=200)
    while not decoder.slots:
        await asyncio.sleep(0.01)
    assert await bench.queue.cancel(rid) == "FLAGGED"
    _, ending = await bench.answer(rid)
    assert ending.reason == ending_pb2.FINISH_REASON_CANCELLED
    async with asyncio.timeout(60):
        while decoder.slots:
            await asyncio.sleep(0.01)


async def test_a_dead_decoder_costs_no_token(bench: Bench) -> None:
    first, stack = await bench.decoder(delay_s=0.01)
    bench.scheduler()
    rids = [await bench.ask([i, 2, 3], max_tokens=80) for i in range(4)]
    while len(first.slots) < 4 or min(map(len, first.slots.values())) < 20:
        await asyncio.sleep(0.01)
    await bench.decoder()
    await stack.aclose()
    for i, rid in enumerate(rids):
        tokens, _ = await bench.answer(rid)
        assert tokens == generate([i, 2, 3], 80)


async def test_a_frozen_decoder_is_given_up_after_two_seconds(bench: Bench) -> None:
    frozen, _ = await bench.decoder(delay_s=0.01)
    bench.scheduler()
    rid = await bench.ask([1, 2, 3], max_tokens=80)
    while not frozen.slots:
        await asyncio.sleep(0.01)
    frozen.stalled.set()
    await bench.decoder()
    tokens, _ = await bench.answer(rid)
    assert tokens == generate([1, 2, 3], 80)


async def test_a_scheduler_that_was_frozen_keeps_its_decoder(bench: Bench) -> None:
    decoder, _ = await bench.decoder()
    bench.scheduler()
    await bench.answer(await bench.ask([1, 2, 3]))
    lease = decoder.largest_lease
    time.sleep(2.2)  # and all else in this process with it
    tokens, _ = await bench.answer(await bench.ask([4, 5, 6]))
    assert tokens == generate([4, 5, 6], 10)
    assert decoder.largest_lease == lease


async def test_a_stopped_scheduler_gives_back_and_the_next_goes_on(bench: Bench) -> None:
    decoder, _ = await bench.decoder(delay_s=0.01)
    stop, task = bench.scheduler()
    rid = await bench.ask([1, 2, 3], max_tokens=100)
    while not decoder.slots or min(map(len, decoder.slots.values())) < 20:
        await asyncio.sleep(0.01)
    stop.set()
    assert await task == 0
    found = await bench.queue.read(rid, 1)
    assert found is not None and found.state == "queued"
    bench.scheduler()
    tokens, _ = await bench.answer(rid)
    assert tokens == generate([1, 2, 3], 100)


async def test_a_scheduler_that_dies_is_fenced_off(bench: Bench) -> None:
    decoder, _ = await bench.decoder(delay_s=0.01)
    dead = new_instance_id()
    await bench.queue.renew(dead, GetLoadResponse(), register=True, tokens_per_s=None)
    rid = await bench.ask([1, 2, 3], max_tokens=30)
    assert len(await bench.queue.take(dead, [Places("", 1, 1 << 30)]) or []) == 1
    await bench.queue.lease_decoder(decoder.id, dead)
    bench.scheduler()
    tokens, _ = await bench.answer(rid)
    assert tokens == generate([1, 2, 3], 30)


async def test_a_scheduler_that_was_fenced_off_ends_with_its_own_status(bench: Bench) -> None:
    _, task = bench.scheduler()
    (sid,) = await bench.registered(1)
    await bench.redis.zrem(f"{bench.keys.prefix}:scheds", sid)
    assert await asyncio.wait_for(task, 60) == FENCED


async def test_it_answers_health_reflection_and_load(bench: Bench, short_tmp: Path) -> None:
    await bench.decoder()
    address = f"unix:{short_tmp}/s"
    bench.scheduler(listen=address)
    await bench.answer(await bench.ask([1, 2, 3]))
    async with open_channel(address) as opened:
        answer = await SchedulerServiceStub(opened).GetLoad(GetLoadRequest())
        assert [d.blocks_total for d in answer.decoders] == [199]
        totals = answer.decoders[0].totals
        assert totals.steps == 10 and totals.tokens == 3 + 9
        load = answer.decoders[0]
        assert load.step_target_us == 250_000 and load.step_predicted_us > 0
        assert load.prompt_budget == 64 - 64 // 17 - 1  # beside the only stream, in no time
        assert sum(load.read_steps.counts) == 9 and load.read_steps.total_s > 0
        assert totals.plan_us > 0 and totals.log_us > 0 and totals.step_us >= totals.steps
        call: Any = opened.unary_unary("/tessera.scheduler.v1.SchedulerService/Nothing")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_endings_tell_how_often_their_request_was_preempted(bench: Bench) -> None:
    await bench.decoder()  # of 800 tokens, for 1,024
    bench.scheduler()
    rids = [await bench.ask([number, 2, 3], max_tokens=125, n=2) for number in range(4)]
    told = []
    for rid in rids:
        told.append(max(ending.preemptions for _, ending in await bench.answers(rid, 2)))
    async with asyncio.timeout(60):
        while True:
            decoders = [decoder for load in await bench.queue.loads() for decoder in load.decoders]
            if sum(decoder.preemptions for decoder in decoders) == sum(told) > 0:
                break
            await asyncio.sleep(0.1)
