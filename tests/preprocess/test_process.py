"""Preprocess as a process of its own."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.artifacts.store import ArtifactReader, remove_abandoned
from shared.net.channels import open_channel
from shared.settings import child_environment
from tessera.preprocess.v1.preprocess_pb2 import PrepareRequest
from tessera.preprocess.v1.preprocess_pb2_grpc import PreprocessServiceStub
from tests.support.preprocess.service import (
    PreprocessMaker,
    RunningPreprocess,
    file_of,
    image,
    picture,
    text,
    turn,
)


@contextlib.asynccontextmanager
async def process(
    model: Path, redis_url: str, folder: Path
) -> AsyncIterator[tuple[subprocess.Popen[bytes], RunningPreprocess]]:
    address = f"unix:{folder}/p.sock"
    arguments = ["--model", model, "--redis-url", redis_url, "--listen", address]
    child = subprocess.Popen(
        [sys.executable, "-m", "services.preprocess", *map(str, arguments)],
        env=child_environment(
            PYTHONPATH=os.pathsep.join(filter(None, sys.path)),
            TESSERA_ARTIFACT_DIR=str(folder / "artifacts"),
            TESSERA_PREPROCESS_MEDIA_WORKERS="1",
        ),
    )
    channel = open_channel(address)
    try:
        while child.poll() is None:
            with contextlib.suppress(Exception):
                health: Any = health_pb2_grpc.HealthStub(channel)
                answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=5)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    break
            await asyncio.sleep(0.05)
        yield child, RunningPreprocess(PreprocessServiceStub(channel), channel, address)
    finally:
        await channel.close()
        child.kill()
        child.wait()


def workers_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [
        int(child)
        for child in children
        if b"image_worker" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


async def test_a_killed_service_leaves_mapped_pixels_and_no_processes(
    clip_folder: Path, redis_url: str, short_tmp: Path
) -> None:
    async with process(clip_folder, redis_url, short_tmp) as (child, service):
        item = (await service.chat(turn("user", image(file_of(picture()))))).media[0]
        reader = ArtifactReader()
        mapped = await reader.open(item.pixels)
        before = mapped.copy()
        workers = workers_of(child.pid)
        assert len(workers) == 1
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert len(remove_abandoned(short_tmp / "artifacts")) == 1
        assert reader.try_open_local(item.pixels) is None
        assert (mapped == before).all()
        while Path(f"/proc/{workers[0]}/cmdline").exists() and is_running(workers[0]):
            await asyncio.sleep(0.05)  # its input ends with the service


async def test_a_stopped_service_exits_in_order(
    clip_folder: Path, redis_url: str, short_tmp: Path
) -> None:
    async with process(clip_folder, redis_url, short_tmp) as (child, service):
        await service.chat(turn("user", image(file_of(picture()))))
        child.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(child.wait) == 0
    assert list((short_tmp / "artifacts").iterdir()) == []


async def test_short_prompts_overtake_a_very_long_one(
    llama_folder: Path, make_preprocess: PreprocessMaker
) -> None:
    async with make_preprocess(llama_folder, max_model_len=100_000_000) as service:
        long = asyncio.create_task(
            service.prepare(PrepareRequest(text="The red circle. " * 150_000))
        )
        await asyncio.sleep(0)
        for number in range(20):
            await service.chat(turn("user", text(f"hi {number}")))
        assert not long.done()
        assert len((await long).token_ids) > 1_000_000


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False
