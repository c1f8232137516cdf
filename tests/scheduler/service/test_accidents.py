"""Unexpected failures inside the scheduler: the decoder is bound again, and nothing piles up."""

import asyncio
from types import SimpleNamespace
from typing import Any

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
