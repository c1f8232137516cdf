"""What the path through all services adds to the model: one stream, against the same model called in process."""

import argparse
import asyncio
import statistics
import tempfile
from pathlib import Path

from benchmarks.checkpoints import toy_model
from benchmarks.system import in_process
from benchmarks.system.stream_client import ask
from tests.support.processes.system import System

PROMPT = 64
COUNT = 200


def main(arguments: list[str]) -> None:
    """Prints medians in milliseconds of both, and the difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    repeats = parser.parse_args(arguments).repeats
    with tempfile.TemporaryDirectory() as folder:
        model = toy_model.make(Path(folder) / "toy")
        alone_first, alone_between = in_process.generate(model, PROMPT, COUNT, repeats)
        with System(model) as system:
            served_first, served_between = asyncio.run(_served(system.port, repeats))
    print(f"\n{'':24}{'in process':>12}{'served':>12}{'added':>12}   (median, ms)")
    for name, alone, served in (
        ("first token", alone_first, served_first),
        ("between tokens", alone_between, served_between),
    ):
        a, b = 1000 * statistics.median(alone), 1000 * statistics.median(served)
        print(f"{name:24}{a:12.2f}{b:12.2f}{b - a:12.2f}")
    p99 = 1000 * statistics.quantiles(served_between, n=100)[98]
    print(f"{'between tokens, P99':24}{'':12}{p99:12.2f}")


async def _served(port: int, repeats: int) -> tuple[list[float], list[float]]:
    first, between = [], []
    for repeat in range(repeats + 2):
        # Other prompts each time, or the prefix cache would answer.
        prompt = [(11 * repeat + 7 * i) % 200 + 2 for i in range(PROMPT)]
        stream = await ask(port, "toy", prompt, COUNT)
        assert stream.tokens == COUNT
        if repeat >= 2:
            first.append(stream.first)
            between += stream.between
    return first, between
