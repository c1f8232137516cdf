"""What drafts change between tokens, through all services: `make bench ARGS='drafts /path/to/checkpoint'`.

Two systems that differ in `--speculation` alone get the same requests round by round in turn: greedy ones, whose
answers fall into repetitions where weights are random, at once where four ids alone are allowed, and drawn ones, in
which nothing comes twice. Answers are compared. A stream's time per output token is that from its first token to its
last, divided by the tokens between.
"""

import argparse
import asyncio
import statistics
from pathlib import Path
from typing import Any

from benchmarks.system.stream_client import Stream, ask
from tests.support.processes.system import System

_PROMPT = 32
_CASES: dict[str, dict[str, Any]] = {
    "four ids": {"allowed_token_ids": [5, 6, 7, 8]},
    "greedy": {},
    "drawn": {"temperature": 1.0},
}


def main(arguments: list[str]) -> None:
    """Prints medians of the rounds of both, in milliseconds a token, and the ratio of these."""
    parser = argparse.ArgumentParser(prog="drafts", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128, help="of each stream in a round")
    parser.add_argument("--flags", default="", help="more flags of both systems")
    told = parser.parse_args(arguments)
    flags = told.flags.split()
    with (
        System(told.model, *flags, "--speculation", "off") as off,
        System(told.model, *flags, "--speculation", "auto") as on,
    ):
        print(f"{'':10}{'streams':>8}{'off':>10}{'on':>10}{'ratio':>8}")
        for streams in told.streams:
            for name, more in _CASES.items():
                found: list[tuple[float, float]] = []
                for number in range(told.rounds + 1):
                    pair = [
                        asyncio.run(_round(system.port, number, streams, told, more))
                        for system in ((off, on) if number % 2 else (on, off))
                    ]
                    if number % 2 == 0:
                        pair.reverse()
                    without, with_drafts = pair
                    if [s.ids for s in without] != [s.ids for s in with_drafts]:
                        raise RuntimeError("drafts have changed an answer")
                    if number:  # in the first one memory is touched, and costs are learned
                        found.append((_tpot(without), _tpot(with_drafts)))
                before, after = (statistics.median(times) for times in zip(*found, strict=True))
                ratio = statistics.median(now / then for then, now in found)
                print(
                    f"{name:10}{streams:8}{before:10.2f}{after:10.2f}{ratio:8.2f}",
                    flush=True,
                )


def _tpot(streams: list[Stream]) -> float:
    return 1e3 * statistics.median(statistics.fmean(stream.between) for stream in streams)


async def _round(
    port: int, number: int, streams: int, told: argparse.Namespace, more: dict[str, Any]
) -> list[Stream]:
    """Prompts are others in each round: none is found in a cache."""
    prompts = [
        [(13 * (number * streams + stream) + 7 * i) % 200 + 2 for i in range(_PROMPT)]
        for stream in range(streams)
    ]
    return await asyncio.gather(
        *(
            # Where all tokens are about as likely, equal random numbers give equal answers to any prompt.
            ask(port, told.model.name, prompt, told.tokens, seed=number * streams + stream, **more)
            for stream, prompt in enumerate(prompts)
        )
    )
