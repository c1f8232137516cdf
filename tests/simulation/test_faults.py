"""Seeds of the whole system under faults (CI runs hundreds), and proof that the simulation sees what it looks for."""

import concurrent.futures
import gc
import multiprocessing
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.simulation.planted import PLANTED, planted
from tests.simulation.virtual_loop import Process, VirtualLoop
from tests.simulation.world import Outcome, simulate

SEEDS = int(os.environ.get("TESSERA_SIMULATION_SEEDS", "10"))
_ROOT = Path(__file__).parents[2]
_AT_A_TIME = 5  # few, so that all cores end at about the same time
_FEW = 20
_SEEDS_WITH_A_FAULT = 120  # what the rarest of them needs takes place in one of a hundred


def _run(first: int) -> list[Outcome]:
    return [simulate(seed) for seed in range(first, min(first + _AT_A_TIME, SEEDS))]


def _outcomes() -> Iterator[Outcome]:
    """All seeds: many of them on all cores, where a few would wait for processes to start."""
    if SEEDS <= _FEW:
        yield from map(simulate, range(SEEDS))
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        os.cpu_count(), context, initializer=gc.freeze
    ) as pool:
        for some in pool.map(_run, range(0, SEEDS, _AT_A_TIME)):
            yield from some


@pytest.mark.timeout(400)
def test_nothing_accepted_is_lost_whatever_happens() -> None:
    faults: Counter[str] = Counter()
    tokens, broken = 0, []
    for outcome in _outcomes():
        faults += outcome.faults
        tokens += outcome.tokens
        if outcome.failures:
            command = f"python -m tests.simulation --seed {outcome.seed} --trace"
            broken.append("\n    ".join([command, *outcome.failures[:3]]))
    assert not broken, "\n".join([f"{len(broken)} of {SEEDS} seeds; replay with", *broken])
    kinds = {"kill", "freeze", "cut", "delay", "partition", "drain"}
    assert kinds <= faults.keys() and tokens > 50 * SEEDS


def test_a_calm_run_gives_every_client_its_text() -> None:
    outcome = simulate(7, faults=False)
    assert outcome.failures == [] and outcome.faults == {} and outcome.tokens > 0


@pytest.mark.timeout(400)
@pytest.mark.full
@pytest.mark.parametrize("fault", sorted(PLANTED))
def test_a_deliberate_fault_is_caught(fault: str) -> None:
    for seed in range(_SEEDS_WITH_A_FAULT):
        with planted(fault):
            outcome = simulate(seed)
        if outcome.failures:
            assert simulate(seed).failures == []  # it is the fault that breaks it
            return
    pytest.fail(f"{fault} was not seen in {_SEEDS_WITH_A_FAULT} seeds")


def test_a_seed_is_the_same_run_every_time_and_everywhere() -> None:
    here = [simulate(seed).digest for seed in range(2)]
    assert here == [simulate(seed).digest for seed in range(2)]
    assert len(set(here)) == 2
    command = [sys.executable, "-m", "tests.simulation", "--seeds", "2", "--digest"]
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    said = subprocess.check_output(command, cwd=_ROOT, env=environment, text=True)
    assert said.splitlines()[:2] == [f"{seed} {digest}" for seed, digest in enumerate(here)]


def test_a_killed_process_runs_no_further_and_a_frozen_one_later() -> None:
    loop = VirtualLoop()
    said: list[tuple[float, str]] = []
    killed, frozen = Process("killed"), Process("frozen")

    async def tick(name: str) -> None:
        import asyncio

        try:
            for _ in range(3):
                said.append((loop.now, name))
                await asyncio.sleep(1)
        finally:
            said.append((loop.now, f"{name} is over"))

    async def body() -> None:
        import asyncio

        loop.spawn(killed, tick("killed"))
        loop.spawn(frozen, tick("frozen"))
        await asyncio.sleep(0.5)
        loop.kill(killed)
        frozen.frozen = True
        await asyncio.sleep(5)
        loop.resume(frozen)
        await asyncio.sleep(5)

    loop.run_until_complete(body())
    assert [name for _, name in said if name.startswith("killed")] == ["killed"]
    assert said[2:] == [(5.5, "frozen"), (6.5, "frozen"), (7.5, "frozen is over")]
    loop.close_suspended()
    loop.close()
