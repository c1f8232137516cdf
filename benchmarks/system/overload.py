"""Four times the capacity of a system: how fast requests are refused, and whether admitted ones become slower.

Capacity is measured first: as many requests at a time as the gateway admits, the next one sent when one is answered.
Then such requests come at several times that rate, whether or not any has been answered. Every one must end: with a
whole answer, or with a 429 that says when to come back.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import uvloop

from benchmarks.checkpoints import toy_model
from benchmarks.load.event_reader import EventReader
from benchmarks.load.load import Pacing
from shared.client.http import HttpClient, HttpError, HttpRefusal
from tests.support.processes.system import System

_REFUSED_WITHIN_S = 0.050
_SLOWER = 1.5
Body = Callable[[], bytes]
_PATH = "/v1/completions"


@dataclass(slots=True)
class Answer:
    """One request: "whole", "refused" (429 with Retry-After) or what went wrong; seconds to its first token, or to
    its refusal.
    """

    how: str
    first_s: float


def main(arguments: list[str]) -> int:
    """Prints both phases. Returns 1 if a request was dropped or a goal is missed."""
    parser = argparse.ArgumentParser(prog="overload", description=__doc__)
    parser.add_argument("--model", type=Path, help="checkpoint folder; a toy unless given")
    parser.add_argument("--limit", type=int, default=32, help="requests that the gateway admits")
    parser.add_argument("--times", type=float, default=4.0, help="how many times capacity")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--serve", default="", help="more flags for `tessera serve`, in one string")
    told = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        model = told.model or toy_model.make(Path(folder) / "toy")
        flags = ["--max-waiting-requests", str(told.limit), *told.serve.split()]
        with System(model, *flags, ready_within_s=300) as system:
            calm, loaded, rate = uvloop.run(_both(told, system.url))
    print(f"capacity: {rate:.1f} requests/s with {told.limit} at a time")
    print(_line("capacity", calm))
    print(_line(f"x {told.times:g}", loaded))
    problems = _problems(calm, loaded)
    print("; ".join(problems) or "kept: nobody dropped, refused in time, first tokens as before")
    return int(bool(problems))


async def _both(told: argparse.Namespace, url: str) -> tuple[list[Answer], list[Answer], float]:
    """Answers at capacity and above it, and capacity in requests a second."""
    client = HttpClient(url)
    model = json.loads(await client.get("/v1/models"))["data"][0]["id"]
    source = random.Random(0)

    def body() -> bytes:
        fields = {
            "model": model,
            "prompt": [source.randrange(10, 250) for _ in range(told.prompt)],
            "max_tokens": told.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        return json.dumps(fields).encode()

    await _lanes(client, body, told.limit, 2.0)
    began = time.perf_counter()
    calm = await _lanes(client, body, told.limit, told.seconds / 3)
    rate = len(calm) / (time.perf_counter() - began)
    loaded = await _arrivals(client, body, told.times * rate, told.seconds)
    client.close()
    return calm, loaded, rate


async def _lanes(client: HttpClient, body: Body, lanes: int, seconds: float) -> list[Answer]:
    """A closed loop."""
    until = time.perf_counter() + seconds
    answers: list[Answer] = []

    async def lane() -> None:
        while time.perf_counter() < until:
            answers.append(await _ask(client, body()))

    await asyncio.gather(*(lane() for _ in range(lanes)))
    return answers


async def _arrivals(client: HttpClient, body: Body, rate: float, seconds: float) -> list[Answer]:
    """An open loop: a Poisson process."""
    delays = Pacing(rate).delays(round(rate * seconds), seed=1)
    bodies = [body() for _ in delays]
    began = time.perf_counter()
    tasks = []
    for delay, one in zip(delays, bodies, strict=True):
        wait = began + delay - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(_ask(client, one)))
    return list(await asyncio.gather(*tasks))


async def _ask(client: HttpClient, body: bytes) -> Answer:
    reader = EventReader()
    sent = time.perf_counter()
    try:
        async with asyncio.timeout(120):
            await client.request("POST", _PATH, body, reader.feed)
    except HttpRefusal as refusal:
        taken = time.perf_counter() - sent
        if refusal.status == 429 and refusal.retry_after_s >= 1:
            return Answer("refused", taken)
        return Answer(str(refusal), taken)
    except (HttpError, TimeoutError) as error:
        return Answer(f"dropped: {error}", time.perf_counter() - sent)
    if reader.error() or not reader.times:
        return Answer(reader.error() or "no tokens", 0.0)
    return Answer("whole", reader.times[0] - sent)


def _problems(calm: Sequence[Answer], loaded: Sequence[Answer]) -> list[str]:
    problems = [
        f"{count} x {how}"
        for how, count in Counter(a.how for a in [*calm, *loaded]).items()
        if how not in ("whole", "refused")
    ]
    refused, before, after = (
        _p99(loaded, "refused"),
        _p99(calm, "whole"),
        _p99(loaded, "whole"),
    )
    if refused > _REFUSED_WITHIN_S:
        problems.append(f"refused within {1000 * refused:.0f} ms at P99")
    if after > _SLOWER * before:
        problems.append(f"first tokens {after / before:.2f} times as late at P99")
    return problems


def _line(name: str, answers: Sequence[Answer]) -> str:
    counts = Counter(answer.how for answer in answers)
    return (
        f"{name:<10}{len(answers):>7} asked {counts['whole']:>6} answered {counts['refused']:>6} refused   "
        f"first token P50 {1000 * _rank(answers, 'whole', 50):.0f} P99 {1000 * _p99(answers, 'whole'):.0f} ms   "
        f"refusal P50 {1000 * _rank(answers, 'refused', 50):.1f} P99 {1000 * _p99(answers, 'refused'):.1f} ms"
    )


def _p99(answers: Sequence[Answer], how: str) -> float:
    return _rank(answers, how, 99)


def _rank(answers: Sequence[Answer], how: str, percent: float) -> float:
    found = [answer.first_s for answer in answers if answer.how == how]
    return float(np.percentile(found, percent)) if found else 0.0
