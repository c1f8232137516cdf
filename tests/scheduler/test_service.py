"""The whole scheduler process against a real Redis and a decoder that speaks the real step stream.

The decoder is played by arithmetic, so that every token can be predicted; the scheduler, its queue, log and stream are
the production ones.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from support.tokenizers import byte_level_tokenizer, save

from services.scheduler.server import FENCED, serve
from services.scheduler.settings import SchedulerSettings
from shared import token_log
from shared.keys import Keys, new_instance_id, new_request_id
from shared.queue import Queue, TokenChannel, connect
from shared.registry import Announcement
from shared.rpc import RoomServer, channel
from shared.text import TokenBytes
from tessera.common.v1 import ending_pb2
from tessera.common.v1.sampling_pb2 import SamplingParams
from tessera.decoder.v1 import decoder_pb2
from tessera.decoder.v1.decoder_pb2_grpc import (
    DecoderServiceServicer,
    add_DecoderServiceServicer_to_server,
)
from tessera.scheduler.v1.queue_pb2 import LogBatch, ReplyFormat, RequestSpec
from tessera.scheduler.v1.scheduler_pb2 import GetLoadRequest
from tessera.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub

MODEL = "arithmetic"


def next_token(tokens: list[int]) -> int:
    return (sum(tokens) * 31 + len(tokens)) % 97 + 5


def generate(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def ints(data: bytes) -> list[int]:
    values: list[int] = np.frombuffer(data, "<i4").tolist()
    return values


class PlayedDecoder(DecoderServiceServicer):
    """Keeps token histories and answers plans; `delay_s` is the length of a step."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.id = new_instance_id()
        self.delay_s = delay_s
        self.largest_lease = 0
        self.slots: dict[int, list[int]] = {}
        self.stalled = asyncio.Event()

    async def Steps(self, requests: Any, context: Any) -> AsyncIterator[decoder_pb2.StepsResponse]:
        first = await anext(aiter(requests))
        assert first.open.decoder_id == self.id
        assert first.open.lease > self.largest_lease
        self.largest_lease = first.open.lease
        self.slots.clear()
        yield decoder_pb2.StepsResponse(
            hello=decoder_pb2.Hello(
                decoder_id=self.id,
                model_fingerprint=b"f" * 16,
                block_size=4,
                num_blocks=200,
                max_slots=16,
                max_model_len=256,
                max_batched_tokens=64,
                plans_in_flight=2,
            )
        )
        async for request in requests:
            if request.WhichOneof("message") == "heartbeat":
                yield decoder_pb2.StepsResponse(heartbeat=decoder_pb2.Heartbeat())
                continue
            if self.stalled.is_set():
                await asyncio.sleep(3600)
            await asyncio.sleep(self.delay_s)
            yield decoder_pb2.StepsResponse(result=self.step(request.plan))

    def step(self, plan: decoder_pb2.StepPlan) -> decoder_pb2.StepResult:
        for slot in ints(plan.drop):
            del self.slots[slot]
        for new in plan.new:
            self.slots[new.slot] = ints(new.tokens)
        tokens = []
        for slot in ints(plan.sample_slot):
            tokens.append(next_token(self.slots[slot]))
            self.slots[slot].append(tokens[-1])
        return decoder_pb2.StepResult(
            lease=plan.lease, step=plan.step, tokens=token_log.encode_tokens(tokens)
        )


class Bench:
    """Redis, a queue to put requests in, and starters for schedulers and decoders."""

    def __init__(self, stack: contextlib.AsyncExitStack, url: str, model: Path) -> None:
        self.stack = stack
        self.url = url
        self.model = model
        self.keys = Keys(MODEL)
        self.redis = connect(url)
        self.queue = Queue(self.redis, self.keys)

    async def decoder(
        self, delay_s: float = 0.0
    ) -> tuple[PlayedDecoder, contextlib.AsyncExitStack]:
        played = PlayedDecoder(delay_s)
        stack = await self.stack.enter_async_context(contextlib.AsyncExitStack())
        server = await stack.enter_async_context(RoomServer("127.0.0.1:0", grace_s=0))
        server.add(
            "tessera.decoder.v1.DecoderService", add_DecoderServiceServicer_to_server, played
        )
        await server.ready()
        await stack.enter_async_context(
            Announcement(self.redis, self.keys, "decoder", played.id, server.address)
        )
        return played, stack

    def scheduler(self, listen: str = "127.0.0.1:0") -> tuple[asyncio.Event, asyncio.Task[int]]:
        stop = asyncio.Event()
        settings = SchedulerSettings(
            model=self.model, served_model_name=MODEL, redis_url=self.url, listen=listen
        )
        task = asyncio.create_task(serve(settings, stop))

        async def end() -> None:
            stop.set()
            await asyncio.wait([task], timeout=10)

        self.stack.push_async_callback(end)
        return stop, task

    async def ask(self, prompt: list[int], **sampling: Any) -> str:
        rid = new_request_id(self.keys.tag)
        options = {"n": 1, "max_tokens": 10, **sampling}
        spec = RequestSpec(
            request_id=rid,
            model=MODEL,
            prompt=token_log.encode_tokens(prompt),
            sampling=SamplingParams(**options),
            reply=ReplyFormat(skip_special_tokens=True),
        )
        await self.queue.admit(spec, cost=len(prompt) + options["max_tokens"])
        return rid

    async def answer(self, rid: str, timeout_s: float = 20) -> tuple[list[int], ending_pb2.Ending]:
        async with asyncio.timeout(timeout_s):
            while True:
                found = await self.queue.read(rid, 1)
                assert found is not None
                if found.endings[0] is not None:
                    return token_log.decode_tokens(found.records[0]), found.endings[0]
                await asyncio.sleep(0.01)


@pytest.fixture
async def bench(redis_url: str, tmp_path: Path) -> AsyncIterator[Bench]:
    save(byte_level_tokenizer(), tmp_path)
    async with contextlib.AsyncExitStack() as stack:
        bench = Bench(stack, redis_url, tmp_path)
        stack.push_async_callback(bench.redis.aclose)
        yield bench


async def test_requests_are_taken_run_and_logged(bench: Bench) -> None:
    await bench.decoder()
    bench.scheduler()
    rids = [await bench.ask([i + 1, 2, 3] * (i + 1), max_tokens=5 + i) for i in range(30)]
    for i, rid in enumerate(rids):
        tokens, ending = await bench.answer(rid)
        assert tokens == generate([i + 1, 2, 3] * (i + 1), 5 + i)
        assert ending.reason == ending_pb2.FINISH_REASON_LENGTH
    assert await bench.queue.depth() == (0, 0)


async def test_the_token_channel_tells_what_the_log_holds(bench: Bench) -> None:
    await bench.decoder()
    heard = LogBatch()

    async def listen() -> None:
        async for batch in TokenChannel(bench.redis, bench.keys).batches():
            heard.MergeFrom(batch)

    listener = asyncio.create_task(listen())
    await asyncio.sleep(0.2)
    bench.scheduler()
    rid = await bench.ask([1, 2, 3], max_tokens=20)
    tokens, _ = await bench.answer(rid)
    await asyncio.sleep(0.1)
    listener.cancel()
    assert [e.start for e in heard.events] == list(range(20))
    assert [t for e in heard.events for t in token_log.decode_tokens(e.records)] == tokens
    assert [e.HasField("ending") for e in heard.events] == [False] * 19 + [True]


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
    _, ending = await bench.answer(rid, timeout_s=2)
    assert ending.reason == ending_pb2.FINISH_REASON_CANCELLED
    async with asyncio.timeout(2):
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
    tokens, _ = await bench.answer(rid, timeout_s=15)
    assert tokens == generate([1, 2, 3], 80)


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


async def test_a_scheduler_that_dies_without_a_word_is_fenced_off(bench: Bench) -> None:
    decoder, _ = await bench.decoder(delay_s=0.01)
    dead = new_instance_id()
    await bench.queue.renew(dead, load(), register=True, tokens_per_s=None)
    rid = await bench.ask([1, 2, 3], max_tokens=30)
    assert len(await bench.queue.take(dead, max_requests=1, max_tokens=1 << 30) or []) == 1
    await bench.queue.lease_decoder(decoder.id, dead)
    bench.scheduler()
    tokens, _ = await bench.answer(rid)
    assert tokens == generate([1, 2, 3], 30)


async def test_a_scheduler_that_was_fenced_off_ends_with_its_own_status(bench: Bench) -> None:
    _, task = bench.scheduler()
    await asyncio.sleep(0.5)
    (sid,) = await bench.redis.zrange(f"{bench.keys.prefix}:scheds", 0, -1)
    await bench.redis.zrem(f"{bench.keys.prefix}:scheds", sid)
    assert await asyncio.wait_for(task, 5) == FENCED


async def test_it_answers_health_reflection_and_load(bench: Bench, short_tmp: Path) -> None:
    await bench.decoder()
    address = f"unix:{short_tmp}/s"
    bench.scheduler(listen=address)
    await bench.answer(await bench.ask([1, 2, 3]))
    async with channel(address) as opened:
        answer = await SchedulerServiceStub(opened).GetLoad(GetLoadRequest())
        assert [d.blocks_total for d in answer.decoders] == [199]
        call = opened.unary_unary("/tessera.scheduler.v1.SchedulerService/Nothing")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def load() -> Any:
    from tessera.scheduler.v1.scheduler_pb2 import GetLoadResponse

    return GetLoadResponse()
