"""What holds a service's event loop once it has loaded is done before it reports that it is ready."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from services.decoder import server as decoder
from services.decoder.settings import DecoderSettings
from services.preprocess import server as preprocess
from services.preprocess.settings import PreprocessSettings
from services.scheduler import server as scheduler
from services.scheduler.settings import SchedulerSettings
from services.vision_encoder import server as vision_encoder
from services.vision_encoder.settings import VisionEncoderSettings
from shared.net.heartbeat import Question
from tests.support.checkpoints import make_checkpoint

SERVICES: dict[str, tuple[Callable[..., Coroutine[Any, Any, Any]], Callable[..., Any]]] = {
    "decoder": (decoder.serve, DecoderSettings),
    "preprocess": (preprocess.serve, PreprocessSettings),
    "scheduler": (scheduler.serve, SchedulerSettings),
    "vision_encoder": (vision_encoder.serve, VisionEncoderSettings),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llava"), "llava")


def is_ready(heartbeat: Path) -> bool:
    with Question(heartbeat) as question:
        return question.wait(30).is_ready


@pytest.mark.parametrize("service", SERVICES)
async def test_a_service_settles_before_it_is_ready(
    service: str, checkpoint: Path, short_tmp: Path, redis_url: str
) -> None:
    heartbeat, stop, found = short_tmp / "beat", asyncio.Event(), []
    serve, settings = SERVICES[service]
    options: dict[str, Any] = {
        "model": checkpoint,
        "redis_url": redis_url,
        "artifact_dir": short_tmp / "artifacts",
        "listen": f"unix:{short_tmp}/s",
        "heartbeat": heartbeat,
    }
    running = asyncio.create_task(
        serve(settings(**options), stop, settle=lambda: found.append(is_ready(heartbeat)))
    )
    async with asyncio.timeout(120):
        while not heartbeat.exists() or not await asyncio.to_thread(is_ready, heartbeat):
            assert not running.done(), running.result()
            await asyncio.sleep(0.02)
    stop.set()
    await running
    assert found == [False]
