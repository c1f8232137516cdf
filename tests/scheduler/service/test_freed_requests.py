"""Requests that have ended or gone elsewhere are freed by their reference counts: the process seldom collects."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from services.scheduler.core.plan import StepPlan
from services.scheduler.core.sequence import Sequence
from services.scheduler.decoders.crash_suspects import CrashSuspects
from services.scheduler.decoders.link import DecoderLink
from services.scheduler.output.choice import Choice
from services.scheduler.output.request import Request
from shared.net.supervise import Background
from shared.text.stop_search import StopSearch, StopStrings
from tests.support.arithmetic.service import ArithmeticDecoder
from tests.support.scheduler_bench import Bench
from tests.support.uncollected import alive, without_collecting

PROMPT = [1, 2, 3]
STOPS = ["never" * 100] * 4
_KINDS = (Request, Sequence, Choice, StopSearch, StopStrings)
_TRIES = 6


async def freed(kind: type = Request, *, most: int = 0) -> None:
    """Waits until no more of a kind are left. What has ended is looked through every second."""
    async with asyncio.timeout(60):
        while alive(kind)[kind.__name__] > most:
            await asyncio.sleep(0.05)


async def several(bench: Bench, _: ArithmeticDecoder) -> None:
    await bench.answers(await bench.ask(PROMPT, n=4, stop=STOPS, max_tokens=5), 4)


async def ranked(bench: Bench, _: ArithmeticDecoder) -> None:
    rid = await bench.ask(PROMPT, best_of=3, stop=STOPS, max_tokens=3, logprobs=1)
    await bench.answers(rid, 1, stride=16)


async def beams(bench: Bench, _: ArithmeticDecoder) -> None:
    options: dict[str, Any] = {"use_beam_search": True, "n": 2, "length_penalty": 1.0}
    await bench.answers(await bench.ask(PROMPT, stop=STOPS, max_tokens=3, **options), 2)


async def cancelled(bench: Bench, decoder: ArithmeticDecoder) -> None:
    decoder.delay_s = 0.01
    rid = await bench.ask(PROMPT, n=2, stop=STOPS, max_tokens=200)
    async with asyncio.timeout(60):
        while rid not in decoder.met:
            await asyncio.sleep(0.01)
    await bench.queue.cancel(rid)
    await bench.answers(rid, 2)
    decoder.delay_s = 0.0


async def too_long(bench: Bench, _: ArithmeticDecoder) -> None:
    await bench.answers(await bench.ask(PROMPT * 1000, n=4, stop=STOPS), 4)


@pytest.mark.parametrize("use", [several, ranked, beams, cancelled, too_long])
async def test_ended_requests_are_freed(
    bench: Bench,
    use: Callable[[Bench, ArithmeticDecoder], Awaitable[None]],
) -> None:
    decoder, _ = await bench.decoder()
    bench.scheduler(kept_s=0.0)
    await use(bench, decoder)
    with without_collecting():
        for _ in range(_TRIES):
            await use(bench, decoder)
        await freed()
        # The line of a decoder knows its last sequence until the next one comes.
        assert alive(*_KINDS).total() <= 4, alive(*_KINDS)


async def test_requests_that_move_or_go_back_are_freed(bench: Bench) -> None:
    leaving, _ = await bench.decoder(0.01)
    bench.scheduler(kept_s=0.0)
    await several(bench, leaving)
    with without_collecting():
        rids = [await bench.ask(PROMPT, n=2, stop=STOPS, max_tokens=100) for _ in range(_TRIES)]
        async with asyncio.timeout(60):
            while not leaving.met.issuperset(rids):
                await asyncio.sleep(0.01)
        other, other_runs = await bench.decoder(0.01)
        leaving.draining = True
        async with asyncio.timeout(60):
            while not other.met.issuperset(rids):
                await asyncio.sleep(0.01)
        await freed(most=_TRIES)  # those that were moved
        await other_runs.aclose()
        await freed()  # they are in the queue again
        last, _ = await bench.decoder()
        for rid in rids:
            await bench.answers(rid, 2)
        assert last.met.issuperset(rids)
        await freed()


async def ended(decoder: ArithmeticDecoder, runs: AsyncExitStack) -> None:
    await runs.aclose()


async def silent(decoder: ArithmeticDecoder, runs: AsyncExitStack) -> None:
    decoder.stalled.set()


@pytest.mark.parametrize("lose", [ended, silent])
async def test_the_link_of_a_lost_decoder_is_freed_with_the_plan_it_waited_for(
    bench: Bench, lose: Callable[[ArithmeticDecoder, AsyncExitStack], Awaitable[None]]
) -> None:
    bench.scheduler(kept_s=0.0)
    with without_collecting():
        decoder, runs = await bench.decoder(0.2)
        rid = await bench.ask(PROMPT, max_tokens=20)
        async with asyncio.timeout(60):
            while rid not in decoder.met or not alive(StepPlan):
                await asyncio.sleep(0.01)
        await lose(decoder, runs)
        await freed(StepPlan)
        async with asyncio.timeout(60):
            while alive(DecoderLink).total() > (lose is silent):  # it is bound anew
                await asyncio.sleep(0.05)


async def test_an_inquiry_about_a_lost_decoder_is_freed(bench: Bench) -> None:
    given_back: list[list[str]] = []
    suspects = CrashSuspects(
        bench.queue, lambda _: None, lambda *_: None, lambda ids: given_back.append(ids)
    )

    async def lives() -> bool:
        return False

    with without_collecting():
        suspects.binding_lost([], lives, was_alone=False)
        await freed(Background)
    assert given_back == [[]]
