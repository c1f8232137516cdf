"""What a JSON schema costs between tokens, through all services: `make bench ARGS='schema_tpot /path/to/checkpoint'`.

Equal streams run without a schema and with one for each, round by round in turn. A stream's time per output token is
that from its first token to its last, divided by the tokens between.
"""

import argparse
import asyncio
import statistics
from pathlib import Path
from typing import Any

from benchmarks.kernels.grammar import SCHEMA
from benchmarks.system.stream_client import ask
from tests.support.processes.system import System

_PROMPT = 32
_FORM = {"ignore_eos": False, "structured_outputs": {"json": SCHEMA}}
_CASES: dict[str, dict[str, Any]] = {"without": {}, "each with a schema": _FORM}


def main(arguments: list[str]) -> None:
    """Prints median and lower quartile of the rounds of both, in milliseconds."""
    parser = argparse.ArgumentParser(prog="schema_tpot", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of each stream in a round")
    told = parser.parse_args(arguments)
    found: dict[str, list[float]] = {name: [] for name in _CASES}
    with System(told.model) as system:
        for number in range(told.rounds + 1):
            for name, more in _CASES.items():
                streams = _round(system.port, told.model.name, number, told, more)
                if number:  # in the first one schemas are compiled, and memory is touched
                    found[name].append(1e3 * statistics.median(asyncio.run(streams)))
                else:
                    asyncio.run(streams)
    print(f"\n{'ms a token':22}{'median':>10}{'lower quartile':>18}")
    (middle, low), *_ = shown = [_figures(times) for times in found.values()]
    for name, (now, quick) in zip(found, shown, strict=True):
        changes = 100 * (now / middle - 1), 100 * (quick / low - 1)
        print(f"{name:22}{now:10.2f} ({changes[0]:+.1f} %){quick:10.2f} ({changes[1]:+.1f} %)")


def _figures(times: list[float]) -> tuple[float, float]:
    return statistics.median(times), statistics.quantiles(times, n=4)[0]


async def _round(
    port: int, model: str, number: int, told: argparse.Namespace, more: dict[str, Any]
) -> list[float]:
    """Seconds a token of each stream. Prompts are others in each round: none is found in a cache."""
    prompts = [
        [(13 * (number * told.streams + stream) + 7 * i) % 200 + 2 for i in range(_PROMPT)]
        for stream in range(told.streams)
    ]
    streams = await asyncio.gather(
        *(ask(port, model, prompt, told.tokens, **more) for prompt in prompts)
    )
    for stream in streams:
        if stream.tokens != told.tokens:
            raise RuntimeError(f"a stream ended after {stream.tokens} tokens of {told.tokens}")
    return [statistics.fmean(stream.between) for stream in streams]
