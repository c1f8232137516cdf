"""For how long, and with how much memory, the largest requests and answers keep a gateway.

The gateway runs in a process of its own between stand-ins for its neighbours, as in `gateway_request`. "Turn" is the
longest processor time of its event loop's thread between two turns: for so long everybody else waits.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
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
from tests.support.gateway.turns import LongestTurn
from tests.support.tokenizers import byte_level_tokenizer

_ROOT = Path(__file__).parents[2]
_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_URL_BYTES = 24_000_000
_QUESTION: Any = [{"role": "user", "content": "What is there?"}]
_SCORES = {"messages": _QUESTION, "n": 128, "logprobs": True, "top_logprobs": 20}
_PROMPT = {"prompt": [5] * 4000, "prompt_logprobs": 20, "max_tokens": 1}


@dataclass(frozen=True)
class _Case:
    """Requests that come at once."""

    path: str
    body: dict[str, Any]
    count: int = 1


def _picture(url: str) -> dict[str, Any]:
    content = [{"type": "image_url", "image_url": {"url": url}}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1}


_PERCENT = _picture("data:image/png," + "%89" * (_URL_BYTES // 3))
_BASE64 = _picture("data:image/png;base64," + "iVBO" * (_URL_BYTES // 4))
CASES = {
    "24 MB data URL, percent-encoded": _Case(_CHAT, _PERCENT),
    "ten of them at once": _Case(_CHAT, _PERCENT, count=10),
    "24 MB data URL, base64": _Case(_CHAT, _BASE64),
    "n = 128, top_logprobs 20, 64 tokens": _Case(_CHAT, {**_SCORES, "max_tokens": 64}),
    "three of them at once": _Case(_CHAT, {**_SCORES, "max_tokens": 64}, count=3),
    "the same with 600 tokens": _Case(_CHAT, {**_SCORES, "max_tokens": 600}),
    "prompt_logprobs 20 over 4,000 ids": _Case(_COMPLETIONS, _PROMPT),
    "the same with n = 16": _Case(_COMPLETIONS, {**_PROMPT, "n": 16}),
}


def main(arguments: list[str]) -> int:
    """Prints the longest turn, the memory before and at most, and the seconds of each case."""
    parser = argparse.ArgumentParser(prog="large_requests", description=__doc__)
    parser.add_argument("--only", default="", help="cases whose names hold this")
    told = parser.parse_args(arguments)
    asyncio.run(_measure(told.only))
    return 0


async def _measure(only: str) -> None:
    tokenizer = byte_level_tokenizer()
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ts-", dir="/tmp")))
        redis = stack.enter_context(EmbeddedRedis(folder, folder / "r.sock", persistent=False))
        model = write_model(folder / MODEL, tokenizer)
        table = TokenBytes.from_tokenizer_json(model / "tokenizer.json")
        preprocess = PreprocessPlayer(redis.url, MODEL, tokenizer)
        await stack.enter_async_context(preprocess)
        scheduler = await stack.enter_async_context(SchedulerPlayer(redis.url, MODEL, table))
        ids = tokenizer.encode(ANSWER).ids * 100
        scheduler.answer = lambda spec: ([token] for token in ids[: spec.sampling.max_tokens])
        turn = LongestTurn(folder / "turn")
        process, client = await stack.enter_async_context(
            _gateway(redis.url, model, folder / "turn")
        )
        for name, case in CASES.items():
            if only in name:
                print(f"{name:<38}{await _run(process, client, turn, case)}", flush=True)
                preprocess.seen.clear()


async def _run(
    process: psutil.Process, client: httpx.AsyncClient, turn: LongestTurn, case: _Case
) -> str:
    content = json.dumps(case.body).encode()
    headers = {"content-type": "application/json"}
    Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # the largest size begins anew
    before = process.memory_info().rss
    turn.reset()
    began = time.monotonic()
    replies = await asyncio.gather(
        *(client.post(case.path, content=content, headers=headers) for _ in range(case.count))
    )
    took_s = time.monotonic() - began
    for reply in replies:
        reply.raise_for_status()
    status = Path(f"/proc/{process.pid}/status").read_text()
    most_kb = next(int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line)
    size = sum(len(reply.content) for reply in replies)
    return (
        f" turn {1e3 * turn.seconds:6.1f} ms  memory {before / 1e6:5.0f} to {most_kb / 1e3:5.0f} MB"
        f"  {took_s:5.1f} s  answered {size / 1e6:5.1f} MB"
    )


@contextlib.asynccontextmanager
async def _gateway(
    redis_url: str, model: Path, turns: Path
) -> AsyncIterator[tuple[psutil.Process, httpx.AsyncClient]]:
    """A gateway that notes its longest turn, and a client of it."""
    async with connect(redis_url) as redis, Directory(redis, Keys(MODEL), "gateway") as directory:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.support.gateway.turns", str(turns)),
            *("--model", str(model), "--redis-url", redis_url, "--port", "0", "--grpc-port", "0"),
            *("--log-level", "error", "--max-model-len", "8192"),
            env=child_environment(PYTHONPATH=python_path(_ROOT, _ROOT / "protos")),
            cwd=_ROOT,
        )
        try:
            async with asyncio.timeout(90):
                while not directory.members:
                    await directory.changed()
            address = directory.members[0].address
            async with httpx.AsyncClient(base_url=address, timeout=300) as client:
                await until_ready(client)
                yield psutil.Process(process.pid), client
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
