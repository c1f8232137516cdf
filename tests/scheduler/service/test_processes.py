"""Schedulers as processes of their own, which can be killed and frozen as nothing inside this process can."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.scheduler.server import FENCED
from shared.settings import child_environment, python_path
from tests.support.arithmetic.model import generate
from tests.support.arithmetic.service import ArithmeticDecoder
from tests.support.scheduler_bench import MODEL, Bench

PROMPT = [1, 2, 3]
LENGTH = 240
WITHIN_S = 120  # a scheduler that starts on a busy machine imports for many seconds
_ROOT = Path(__file__).parents[3]


@contextlib.asynccontextmanager
async def scheduler(bench: Bench, socket: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """A scheduler that is registered."""
    before = await bench.redis.zcard(f"{bench.keys.prefix}:scheds")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.scheduler", "--model", str(bench.model)),
        *("--served-model-name", MODEL, "--redis-url", bench.url, "--listen", f"unix:{socket}"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        env=child_environment(PYTHONPATH=python_path(_ROOT, _ROOT / "protos")),
    )
    try:
        async with asyncio.timeout(WITHIN_S):
            while await bench.redis.zcard(f"{bench.keys.prefix}:scheds") == before:
                await asyncio.sleep(0.02)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def begin(bench: Bench, decoder: ArithmeticDecoder) -> list[str]:
    rids = [await bench.ask([*PROMPT, i], max_tokens=LENGTH) for i in range(4)]
    async with asyncio.timeout(WITHIN_S):
        while len(decoder.slots) < 4 or min(map(len, decoder.slots.values())) < 20:
            await asyncio.sleep(0.01)
    return rids


async def bound(decoder: ArithmeticDecoder) -> None:
    """Waits until the first scheduler has the decoder: one that starts now is a spare."""
    async with asyncio.timeout(WITHIN_S):
        while not decoder.largest_lease:
            await asyncio.sleep(0.01)


async def taken_over(decoder: ArithmeticDecoder) -> None:
    """Waits until another scheduler runs requests on the decoder."""
    lease = decoder.largest_lease
    async with asyncio.timeout(WITHIN_S):
        while decoder.largest_lease == lease or not decoder.slots:
            await asyncio.sleep(0.01)


async def check(bench: Bench, rids: list[str]) -> None:
    for i, rid in enumerate(rids):
        assert (await bench.answer(rid))[0] == generate([*PROMPT, i], LENGTH)


@pytest.mark.full
async def test_a_scheduler_that_wakes_from_a_freeze_finds_itself_replaced(
    bench: Bench, short_tmp: Path
) -> None:
    decoder, _ = await bench.decoder(delay_s=0.02)
    async with scheduler(bench, short_tmp / "a") as frozen:
        await bound(decoder)
        async with scheduler(bench, short_tmp / "b"):
            rids = await begin(bench, decoder)
            os.kill(frozen.pid, signal.SIGSTOP)
            await taken_over(decoder)
            os.kill(frozen.pid, signal.SIGCONT)
            assert await asyncio.wait_for(frozen.wait(), WITHIN_S) == FENCED
            await check(bench, rids)


async def test_a_killed_and_a_stopped_scheduler_lose_nothing(bench: Bench, short_tmp: Path) -> None:
    decoder, _ = await bench.decoder(delay_s=0.03)
    async with contextlib.AsyncExitStack() as stack:
        current = await stack.enter_async_context(scheduler(bench, short_tmp / "0"))
        await bound(decoder)
        spare = await stack.enter_async_context(scheduler(bench, short_tmp / "1"))
        rids = await begin(bench, decoder)
        current.kill()
        await taken_over(decoder)
        spare.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(spare.wait(), WITHIN_S) == 0
        states = [await bench.queue.lookup(rid, "") for rid in rids]
        assert {state.state for state in states if state is not None} <= {"queued", "ended"}
        await stack.enter_async_context(scheduler(bench, short_tmp / "z"))
        await check(bench, rids)
