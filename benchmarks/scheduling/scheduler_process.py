"""What a step costs the scheduler as a process: with gRPC and Redis, against a decoder that computes nothing.

Processor time is the kernel's count. The decoder here answers each plan with zeros; requests come from the queue, and
what they generate is written to the token log.
"""

import argparse
import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import uvloop

from benchmarks.checkpoints import toy_model
from services.launcher.redis.embedded_redis import EmbeddedRedis
from services.launcher.service_environment import QUIET_GRPC
from shared.net.rpc.server import RpcServer
from shared.queue import Queue, connect
from shared.queue.keys import Keys, new_instance_id, new_request_id
from shared.queue.registry import Announcement
from shared.queue.token_log import encode_tokens
from shared.settings import child_environment
from tessera.common.v1.sampling_pb2 import SamplingParams
from tessera.decoder.v1.decoder_pb2 import Heartbeat, Hello, StepPlan, StepResult, StepsResponse
from tessera.decoder.v1.decoder_pb2_grpc import (
    DecoderServiceServicer,
    add_DecoderServiceServicer_to_server,
)
from tessera.scheduler.v1.queue_pb2 import RequestSpec

_MODEL = "idle"
_PROMPT = 32


class IdleDecoder(DecoderServiceServicer):
    """Keeps the step stream's contract; `step_s` is how long each step pretends to take."""

    def __init__(self, slots: int, step_s: float) -> None:
        self.id = new_instance_id()
        self.steps = 0
        self._slots = slots
        self._step_s = step_s

    async def Steps(self, requests: Any, context: Any) -> AsyncIterator[StepsResponse]:
        """One stream."""
        await anext(aiter(requests))
        hello = Hello(
            decoder_id=self.id,
            model_fingerprint=b"f" * 16,
            block_size=16,
            num_blocks=self._slots * 80 + 1,
            max_slots=self._slots,
            max_model_len=1280,
            max_batched_tokens=256 + self._slots,
            plans_in_flight=2,
        )
        yield StepsResponse(hello=hello)
        async for request in requests:
            if request.WhichOneof("message") == "heartbeat":
                yield StepsResponse(heartbeat=Heartbeat())
                continue
            if self._step_s:
                await asyncio.sleep(self._step_s)
            yield StepsResponse(result=self._answer(request.plan))

    def _answer(self, plan: StepPlan) -> StepResult:
        self.steps += 1
        return StepResult(lease=plan.lease, step=plan.step, tokens=bytes(len(plan.sample_slot)))


def main(arguments: list[str]) -> None:
    """Prints microseconds of processor time a step, at several numbers of running sequences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--tokens", type=int, default=900, help="of each sequence")
    parser.add_argument("--step-ms", type=float, default=0.0, help="the decoder's time for a step")
    told = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="ts-", dir="/tmp") as folder:
        model = toy_model.make(Path(folder) / _MODEL)
        for running in told.running:
            home = Path(folder) / str(running)
            with EmbeddedRedis(home, Path(folder) / f"{running}.sock") as redis:
                uvloop.run(_measure(redis, model, running, told.tokens, told.step_ms / 1000))


async def _measure(
    redis: EmbeddedRedis, model: Path, running: int, tokens: int, step_s: float
) -> None:
    client = connect(redis.url)
    keys = Keys(_MODEL)
    queue = Queue(client, keys)
    decoder = IdleDecoder(running, step_s)
    listen = f"unix:{model.parent}/decoder-{running}.sock"
    scheduler = _start_scheduler(redis.url, model)
    try:
        async with RpcServer(listen, grace_s=0) as server:
            server.add(
                "tessera.decoder.v1.DecoderService", add_DecoderServiceServicer_to_server, decoder
            )
            await server.ready()
            async with Announcement(client, keys, "decoder", decoder.id, server.address):
                for _ in range(running):
                    await _admit(queue, keys, tokens)
                while decoder.steps < 100:
                    await asyncio.sleep(0.01)
                watched = {"scheduler": scheduler.pid, "Redis": redis.pid, "decoder": os.getpid()}
                before, steps = {r: _spent(p) for r, p in watched.items()}, decoder.steps
                began = time.monotonic()
                while decoder.steps < tokens - 50:
                    await asyncio.sleep(0.01)
                steps = decoder.steps - steps
                elapsed = time.monotonic() - began
                print(
                    f"{running:4} running, {steps} steps of {1e3 * elapsed / steps:.2f} ms:", end=""
                )
                for service, pid in watched.items():
                    print(
                        f"  {service} {1e6 * (_spent(pid) - before[service]) / steps:.0f} us",
                        end="",
                    )
                print(flush=True)
    finally:
        scheduler.terminate()
        scheduler.wait()
        await client.aclose()


def _start_scheduler(redis_url: str, model: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "services.scheduler", "--model", str(model)]
    command += ["--served-model-name", _MODEL, "--redis-url", redis_url, "--log-level", "error"]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=child_environment(**QUIET_GRPC))


async def _admit(queue: Queue, keys: Keys, tokens: int) -> None:
    request_id = new_request_id(keys.tag)
    spec = RequestSpec(
        request_id=request_id,
        model=_MODEL,
        prompt=encode_tokens([random.randrange(2, 4000) for _ in range(_PROMPT)]),
        sampling=SamplingParams(n=1, best_of=1, max_tokens=tokens, stop_token_ids=[1]),
    )
    await queue.admit(spec, cost=_PROMPT + tokens)


def _spent(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
