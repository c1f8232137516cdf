"""Processor time of the gateway for each chat request, whole and streamed.

The gateway runs in a process of its own between stand-ins for its neighbours (`tests/support/gateway/neighbours.py`),
so the time is its own alone, by the kernel's count. `--roots` takes several checkouts: their gateways take turns, round
by round, so that load from elsewhere falls on all of them.
"""

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from services.launcher.redis.embedded_redis import EmbeddedRedis
from shared.queue import connect
from shared.queue.keys import Keys
from shared.queue.registry import Directory
from shared.settings import child_environment, python_path
from shared.text.text_fold import TokenBytes
from tests.support.gateway.neighbours import PreprocessPlayer, SchedulerPlayer
from tests.support.gateway.stage import ANSWER, MODEL, until_ready, write_model
from tests.support.tokenizers import byte_level_tokenizer

_SENTENCE = "The red circle stands left of the blue square, and a dog looks at both. "
SHORT = {"messages": [{"role": "user", "content": "What is there?"}]}
TEN = {
    "messages": [
        {"role": role, "content": _SENTENCE * 3} for _ in range(5) for role in ("user", "assistant")
    ],
    "temperature": 0.7,
    "top_p": 0.9,
    "seed": 7,
    "stop": ["###", "END"],
    "user": "somebody",
}
# name -> (body, tokens of the answer)
WORKLOADS: dict[str, tuple[dict[str, Any], int]] = {
    "short, 1 token": (SHORT, 1),
    "ten messages, 1 token": (TEN, 1),
    "short, 32 tokens": (SHORT, 32),
    "short, 32 tokens, streamed": ({**SHORT, "stream": True}, 32),
}


def main(arguments: list[str]) -> int:
    """Prints microseconds a request for each workload and checkout."""
    parser = argparse.ArgumentParser(prog="gateway_request", description=__doc__)
    here = Path(__file__).parents[2]
    parser.add_argument("--roots", type=Path, nargs="+", default=[here], help="checkouts")
    parser.add_argument("--requests", type=int, default=300, help="in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="workloads whose names hold this")
    parser.add_argument("--clients", type=int, default=8, help="requests at once")
    told = parser.parse_args(arguments)
    asyncio.run(_measure(told))
    return 0


async def _measure(told: argparse.Namespace) -> None:
    tokenizer = byte_level_tokenizer()
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ts-", dir="/tmp")))
        redis = stack.enter_context(EmbeddedRedis(folder, folder / "r.sock", persistent=False))
        model = write_model(folder / MODEL, tokenizer)
        table = TokenBytes.from_tokenizer_json(model / "tokenizer.json")
        await stack.enter_async_context(PreprocessPlayer(redis.url, MODEL, tokenizer))
        scheduler = await stack.enter_async_context(SchedulerPlayer(redis.url, MODEL, table))
        ids = (tokenizer.encode(ANSWER).ids * 8)[:64]
        scheduler.answer = lambda spec: [[token] for token in ids]
        gateways = [
            await stack.enter_async_context(_gateway(root, redis.url, model)) for root in told.roots
        ]
        for name, (body, tokens) in WORKLOADS.items():
            if told.only not in name:
                continue
            found: list[list[float]] = [[] for _ in gateways]
            for turn in range(told.rounds + 1):
                for index, (process, client) in enumerate(gateways):
                    content = {**body, "max_tokens": tokens}
                    spent = await _round(process, client, content, told.requests, told.clients)
                    if turn:  # the first warms up
                        found[index].append(1e6 * spent / told.requests)
            for root, values in zip(told.roots, found, strict=True):
                middle = statistics.median(values)
                print(
                    f"{name:<28} {root.name:<16} {middle:7.0f} us a request"
                    f"  (rounds {min(values):.0f} to {max(values):.0f})",
                    flush=True,
                )


async def _round(
    process: psutil.Process, client: httpx.AsyncClient, body: Any, requests: int, clients: int
) -> float:
    """Processor seconds of the gateway for so many requests."""
    before = process.cpu_times()
    left = iter(range(requests))

    async def ask() -> None:
        for _ in left:
            reply = await client.post("/v1/chat/completions", json=body)
            reply.raise_for_status()

    await asyncio.gather(*(ask() for _ in range(clients)))
    after = process.cpu_times()
    return (after.user - before.user) + (after.system - before.system)


@contextlib.asynccontextmanager
async def _gateway(
    root: Path, redis_url: str, model: Path
) -> AsyncIterator[tuple[psutil.Process, httpx.AsyncClient]]:
    """A gateway of that checkout, ready, and a client of it."""
    async with connect(redis_url) as redis, Directory(redis, Keys(MODEL), "gateway") as directory:
        known = {member.address for member in directory.members}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.gateway", "--model", str(model)),
            *("--redis-url", redis_url, "--port", "0", "--grpc-port", "0"),
            *("--log-level", "warning", "--max-model-len", "8192"),
            env=child_environment(PYTHONPATH=python_path(root, root / "protos")),
            cwd=root,
        )
        try:
            async with asyncio.timeout(90):
                while not (new := [m for m in directory.members if m.address not in known]):
                    await directory.changed()
            async with httpx.AsyncClient(base_url=new[0].address, timeout=60) as client:
                await until_ready(client)
                yield psutil.Process(process.pid), client
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
