"""Two decoders with the instruction sets of different processors behind one gateway: one is killed, and clients learn
whose answers went on at the other.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from shared.cpu_kernels import binding
from shared.queue.keys import Keys
from shared.settings import python_path
from tests.support.checkpoints import make_checkpoint
from tests.support.decoder import instruction_sets
from tests.support.network.http import plain_client
from tests.support.processes.services_in_process import services_in_process

RUNNABLE = [known.name for known in instruction_sets.RUNNABLE]
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.full,
    pytest.mark.skipif(len(RUNNABLE) < 2, reason="this processor has one of the instruction sets"),
]
STREAMS = 8
_ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "llama")


@pytest.fixture
def instructions_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The decoder in this process uses the last set."""
    binding.load_kernels.cache_clear()
    monkeypatch.setenv("TESSERA_CPU_INSTRUCTIONS", RUNNABLE[-1])
    yield
    binding.load_kernels.cache_clear()


@contextlib.contextmanager
def decoder_process(
    folder: Path, redis_url: str, listen: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A decoder that uses the first set."""
    flags = ["--model", str(folder), "--redis-url", redis_url, "--listen", f"unix:{listen}"]
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(_ROOT, _ROOT / "protos"),
        "TESSERA_CPU_INSTRUCTIONS": RUNNABLE[0],
    }
    command = [sys.executable, "-m", "services.decoder", *flags, "--threads", "1"]
    process = subprocess.Popen(command, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class Stream:
    """An answer as a client reads it."""

    def __init__(self) -> None:
        self.request_id = ""
        self.text = ""
        self.has_begun = asyncio.Event()

    async def read(self, http: httpx.AsyncClient, number: int) -> None:
        """Asks and reads to the end."""
        body = {"model": "tiny", "prompt": f"Count to {number}", "max_tokens": 400, "seed": number}
        body |= {"temperature": 1.0, "stream": True, "ignore_eos": True}
        async with http.stream("POST", "/v1/completions", json=body) as reply:
            self.request_id = reply.headers["x-request-id"]
            async for text in _texts(reply):
                self.text += text
                self.has_begun.set()


async def _texts(reply: httpx.Response) -> AsyncIterator[str]:
    async for line in reply.aiter_lines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            yield "".join(choice["text"] for choice in event["choices"])


async def state_of(http: httpx.AsyncClient, rid: str) -> dict[str, Any]:
    found: dict[str, Any] = (await http.get(f"/v1/requests/{rid}")).json()
    return found


@pytest.mark.usefixtures("instructions_here")
async def test_the_status_says_which_answers_went_on_with_other_instructions(
    folder: Path, redis_url: str, short_tmp: Path
) -> None:
    keys = Keys("tiny")
    with (
        services_in_process(folder, redis_url) as system,
        decoder_process(folder, redis_url, short_tmp / "d") as process,
        redis.Redis.from_url(redis_url, decode_responses=True) as known,
    ):
        async with asyncio.timeout(120):
            while known.hlen(f"{keys.prefix}:bound") < 2:
                await asyncio.sleep(0.05)
        async with plain_client(system.base_url.removesuffix("/v1"), timeout=120) as http:
            streams = [Stream() for _ in range(STREAMS)]
            reading = [
                asyncio.create_task(stream.read(http, number))
                for number, stream in enumerate(streams)
            ]
            for stream in streams:
                await stream.has_begun.wait()
            os.kill(process.pid, signal.SIGSTOP)  # nothing ends there any more
            await asyncio.sleep(0.2)  # what it had sent is logged
            begun_in = {
                s.request_id: str(known.hget(keys.request(s.request_id), "numerics"))
                for s in streams
            }
            states = [await state_of(http, s.request_id) for s in streams]
            moved = {
                state["id"]
                for state in states
                if state["status"] == "running"
                and begun_in[state["id"]].startswith(f"{RUNNABLE[0]}-")
            }
            process.kill()
            await asyncio.gather(*reading)
            assert moved, "none was on its way there"
            for stream in streams:
                state = await state_of(http, stream.request_id)
                assert (state["status"], state["usage"]["completion_tokens"]) == ("completed", 400)
                assert state["exact"] == (stream.request_id not in moved)
                async with http.stream("GET", f"/v1/requests/{stream.request_id}/stream") as reply:
                    whole = "".join([text async for text in _texts(reply)])
                assert whole == stream.text, "what was delivered stands"
