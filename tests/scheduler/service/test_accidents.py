"""Unexpected failures inside the scheduler: the decoder is bound again, and nothing piles up."""

import asyncio
import gc
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from services.scheduler.core.sequence import Sequence
from services.scheduler.output import output_tracker
from services.scheduler.output.choice import Choice
from services.scheduler.output.request import Request
from services.scheduler.requests.deadlines import Deadlines
from tessera.decoder.v1 import decoder_pb2
from tests.support.arithmetic.model import generate
from tests.support.scheduler_bench import Bench

PROMPT = [1, 2, 3]


async def test_an_answer_that_cannot_be_read_costs_the_link_and_not_the_decoder(
    bench: Bench,
) -> None:
    decoder, _ = await bench.decoder()
    step, torn = decoder.step, list[int]()

    def tear_the_second(message: decoder_pb2.StepPlan) -> decoder_pb2.StepResult:
        result = step(message)
        if message.step == 2 and not torn:
            result.tokens = b"odd"
            torn.append(message.step)
        return result

    decoder.step = tear_the_second  # type: ignore[method-assign]
    bench.scheduler()
    rid = await bench.ask(PROMPT, max_tokens=20)
    tokens, _ = await bench.answer(rid)
    assert torn and tokens == generate(PROMPT, 20)
    assert await bench.redis.hget(bench.keys.request(rid), "lost_decoders") == b"1"


async def test_deadlines_of_ended_requests_are_forgotten() -> None:
    known: dict[str, Any] = {}
    deadlines = Deadlines(known.get, lambda *_: None)
    for number in range(5_000):
        spec = SimpleNamespace(timeout_ms=3_600_000, first_token_timeout_ms=60_000)
        request: Any = SimpleNamespace(
            spec=spec, request_id=f"r{number}", arrived_ago_ms=0.0, has_begun=False
        )
        assert deadlines.watch(request) is None
        known[request.request_id] = request
        known.pop(f"r{number - 10}", None)  # ten at a time
    assert len(deadlines) < 1_000
    deadlines.close()
    await asyncio.sleep(0)


async def test_ended_requests_do_not_wait_for_the_garbage_collector(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_tracker, "_KEPT_S", 0.0)
    await bench.decoder()
    bench.scheduler()
    await bench.answer(await bench.ask(PROMPT))
    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            rids = [await bench.ask(PROMPT, max_tokens=3), await bench.ask(PROMPT, n=2)]
            rids.append(await bench.ask(PROMPT, best_of=3, max_tokens=3, logprobs=1))
            for rid, n in zip(rids, (1, 2, 1), strict=True):
                await bench.answers(rid, n, stride=16 if rid == rids[-1] else 4)
        kinds = (Request, Sequence, Choice)
        left = Counter(type(o).__name__ for o in gc.get_objects() if isinstance(o, kinds))
    finally:
        gc.enable()
    assert left.total() < 40, left  # of 300 and more
