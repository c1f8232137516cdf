"""What it costs that tokens are logged before they are shown: tokens a second at many streams, with and without.

The system is served from copies of the source, one of which writes no token logs and one no file either. Neither is an
option of the product: what they serve is lost with the next process that dies.
"""

import argparse
import asyncio
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.checkpoints import toy_model
from benchmarks.system.path import processor_seconds
from benchmarks.system.stream_client import ask
from tests.support.processes.system import System

_ROOT = Path(__file__).parents[2]
_SOURCES = ("services", "shared", "protos")

# File -> (what is there, what the copy has instead).
_NO_FILE = (
    "services/launcher/redis/embedded_redis.py",
    "persistent: bool = True",
    "persistent: bool = False",
)
_NO_LOG = (
    (
        "shared/queue/scripts/scheduler/append.lua",
        "local length = redis.call('STRLEN', log) / stride",
        "local length = start",
    ),
    (
        "shared/queue/scripts/scheduler/append.lua",
        "length = redis.call('APPEND', log, fresh) / stride",
        "length = length + #fresh / stride",
    ),
)
VARIANTS = {
    "as served": (),
    "no file": (_NO_FILE,),
    "no log, no file": (_NO_FILE, *_NO_LOG),
}


def main(arguments: list[str]) -> None:
    """Prints medians over turns, and each against the last variant."""
    parser = argparse.ArgumentParser(prog="durability", description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--turns", type=int, default=5)
    told = parser.parse_args(arguments)
    rates: dict[str, list[float]] = defaultdict(list)
    costs: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        model = toy_model.make(Path(folder) / "toy")
        for turn in range(told.turns):
            # In turns, beginning with another one each time: what else the machine does hits all alike.
            names = list(VARIANTS)
            for name in names[turn % 3 :] + names[: turn % 3]:
                with _served(Path(folder) / "copy", model, name) as system:
                    rate, cost = asyncio.run(_measure(system, told.streams, told.tokens))
                rates[name].append(rate)
                costs[name].append(cost)
                print(f"{name:<18}{rate:8.0f} tokens/s {cost:8.1f} us a token", flush=True)
    least = statistics.median(rates["no log, no file"])
    cheapest = statistics.median(costs["no log, no file"])
    print(f"\n{'median':<18}{'tokens/s':>10}{'cost':>8}{'processor us a token':>24}{'cost':>8}")
    for name in VARIANTS:
        rate = statistics.median(rates[name])
        cost = statistics.median(costs[name])
        shares = f"{rate:>10.0f}{1 - rate / least:>8.1%}{cost:>24.1f}{cost / cheapest - 1:>8.1%}"
        print(f"{name:<18}{shares}")


@contextmanager
def _served(copy: Path, model: Path, variant: str) -> Iterator[System]:
    """A system from a copy of the source with a variant's changes."""
    for name in _SOURCES:
        shutil.copytree(_ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    try:
        for file, before, after in VARIANTS[variant]:
            text = (copy / file).read_text()
            if before not in text:
                raise RuntimeError(f"{file} has no {before!r}: this measurement needs mending")
            (copy / file).write_text(text.replace(before, after))
        path = os.pathsep.join([str(copy), str(copy / "protos")])
        program = (
            "env",
            "-C",
            str(copy),
            f"PYTHONPATH={path}",
            sys.executable,
            "-m",
            "services.launcher",
        )
        with System(model, program=program) as system:
            yield system
    finally:
        shutil.rmtree(copy)


async def _measure(system: System, streams: int, tokens: int) -> tuple[float, float]:
    """Tokens a second, and microseconds of processor time for each token in all services."""
    await _run(system.port, streams, 20)
    before = sum(processor_seconds(system).values())
    began = time.perf_counter()
    count = await _run(system.port, streams, tokens)
    elapsed = time.perf_counter() - began
    spent = sum(processor_seconds(system).values()) - before
    return count / elapsed, 1e6 * spent / count


async def _run(port: int, streams: int, tokens: int) -> int:
    prompts = [[(13 * s + 7 * i) % 200 + 2 for i in range(32)] for s in range(streams)]
    answers = await asyncio.gather(*(ask(port, "toy", p, tokens) for p in prompts))
    return sum(answer.tokens for answer in answers)
