"""Real decoders whose kernels use two instruction sets, as hosts with different processors have them."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.cpu_kernels import binding
from shared.queue.token_log import decode_tokens
from tests.support.checkpoints import make_checkpoint
from tests.support.decoder import instruction_sets
from tests.support.scheduler_bench import Bench

PROMPT = list(range(5, 40))
COUNT = 150
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 3, "ignore_eos": True}
RUNNABLE = [known.name for known in instruction_sets.RUNNABLE]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    made = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_checkpoint(made, "llama")
    return made


class Decoders:
    """Running ones by name; each can be ended for good in the middle of its work."""

    def __init__(self, bench: Bench, folder: Path, place: Path) -> None:
        self._bench, self._folder, self._place = bench, folder, place
        self._running: dict[str, tuple[Any, contextlib.AsyncExitStack]] = {}

    async def start(self, name: str) -> Any:
        """What `load` has given it."""
        stack = await self._bench.stack.enter_async_context(contextlib.AsyncExitStack())
        listen = self._place / f"{name}.sock"
        running = await self._bench.real_decoder(
            self._folder, listen, name=name, stack=stack, dtype="float32", threads=1
        )
        self._running[name] = running, stack
        return running.loaded

    async def lose_the_one_that_runs(self, rid: str) -> list[int]:
        """Waits for the first tokens, ends the decoder that made them, and returns what was logged by then."""
        async with asyncio.timeout(60):
            while True:
                found = await self._bench.queue.read(rid, 1)
                assert found is not None and found.state != "ended"
                known = decode_tokens(found.records[0])
                if len(known) >= 3:
                    break
                await asyncio.sleep(0)
        (stack,) = [
            stack
            for running, stack in self._running.values()
            if running.loaded.worker.slots.known.any()
        ]
        await stack.aclose()
        return known


@pytest.fixture
def decoders(bench: Bench, folder: Path, short_tmp: Path) -> Decoders:
    return Decoders(bench, folder, short_tmp)


async def is_exact(bench: Bench, rid: str) -> bool:
    state = await bench.queue.lookup(rid, "")
    assert state is not None
    return state.is_exact


@pytest.fixture
def asks_for(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Decides which instruction set the decoders that start from now on use."""

    def ask(name: str) -> None:
        binding.load_kernels.cache_clear()
        monkeypatch.setenv("TESSERA_CPU_INSTRUCTIONS", name)

    yield ask
    binding.load_kernels.cache_clear()


@pytest.mark.skipif(len(RUNNABLE) < 2, reason="this processor has one of the instruction sets")
async def test_an_answer_goes_on_with_other_instructions_and_says_so(
    bench: Bench, decoders: Decoders, asks_for: Callable[[str], None]
) -> None:
    loaded = []
    for name in (RUNNABLE[0], RUNNABLE[-1]):
        asks_for(name)
        loaded.append(await decoders.start(name))
        assert loaded[-1].numerics.startswith(f"{name}-")
    assert loaded[0].fingerprint == loaded[1].fingerprint
    bench.scheduler()
    rid = await bench.ask(PROMPT, max_tokens=COUNT, **SAMPLED)
    known = await decoders.lose_the_one_that_runs(rid)
    tokens, ending = await bench.answer(rid)
    assert not ending.HasField("failure") and len(tokens) == COUNT
    assert tokens[: len(known)] == known, "what was delivered stands"
    assert not await is_exact(bench, rid)


async def test_an_answer_goes_on_with_equal_instructions_as_if_nothing_had_happened(
    bench: Bench, decoders: Decoders
) -> None:
    loaded = [await decoders.start(name) for name in ("first", "second")]
    assert loaded[0].numerics == loaded[1].numerics != ""
    bench.scheduler()
    whole, _ = await bench.answer(await bench.ask(PROMPT, max_tokens=COUNT, **SAMPLED))
    rid = await bench.ask(PROMPT, max_tokens=COUNT, **SAMPLED)
    await decoders.lose_the_one_that_runs(rid)
    assert (await bench.answer(rid))[0] == whole
    assert await is_exact(bench, rid)
