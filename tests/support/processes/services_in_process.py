"""A whole system of real services on real sockets, all of them in this process, on an event loop of its own thread."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from anyio.from_thread import start_blocking_portal

from services.decoder import server as decoder
from services.decoder.settings import DecoderSettings
from services.families import registry
from services.gateway.gateway import open_gateway
from services.gateway.settings import GatewaySettings
from services.preprocess import server as preprocess
from services.preprocess.settings import PreprocessSettings
from services.scheduler import server as scheduler
from services.scheduler.settings import SchedulerSettings
from services.vision_encoder import server as vision_encoder
from services.vision_encoder.settings import VisionEncoderSettings
from shared.checkpoint.folder import Checkpoint
from tests.support.compared import take_as_compared
from tests.support.gateway.stage import until_ready
from tests.support.network.http import plain_client
from tests.support.preprocess.forked_workers import ForkedWorker

# A model is compared with its class in a process of its own, which imports all that there is.
_READY_S = 240.0


@dataclass(frozen=True)
class Addresses:
    """Where the gateway listens: for an OpenAI client, and for ChatService."""

    base_url: str
    grpc_address: str


@contextlib.contextmanager
def services_in_process(
    model: Path, redis_url: str, mindie_shm: Path | None = None, **gateway: Any
) -> Iterator[Addresses]:
    """One of each service that the model needs, ready, on a Redis that is emptied first. The model has the name that
    `serve` gives it; `gateway` are settings of the gateway.

    A model by the code of transformers is taken as compared with its class.

    For tests of what the services compute together. Tests of their processes start a `System`, which takes three
    times as much processor time: each process imports its libraries anew.
    """
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    with (
        tempfile.TemporaryDirectory(prefix="ts-", dir="/tmp") as folder,
        start_blocking_portal() as portal,
        contextlib.ExitStack() as stack,
    ):
        running = _running(model, redis_url, folder, mindie_shm, gateway)
        addresses = stack.enter_context(portal.wrap_async_context_manager(running))
        try:
            yield addresses
        finally:
            # Behind a test that fails too: its error would cancel services in the middle of their work, some of which
            # then wait for others that are gone.
            stack.close()


@contextlib.asynccontextmanager
async def _running(
    model: Path,
    redis_url: str,
    folder: str,
    mindie_shm: Path | None,
    gateway_settings: Mapping[str, Any],
) -> AsyncIterator[Addresses]:
    stop = asyncio.Event()
    artifacts = Path(folder) / "artifacts"
    common: dict[str, Any] = {"model": model, "redis_url": redis_url, "artifact_dir": artifacts}
    own = {"port": 0, "grpc_port": 0, "shutdown_timeout": 0.2, **gateway_settings}
    settings = GatewaySettings(**common, **own)
    take_as_compared(model)
    async with asyncio.TaskGroup() as group:
        for service in _behind_the_gateway(common, folder, stop, mindie_shm):
            group.create_task(service)
        try:
            async with (
                open_gateway(settings) as gateway,
                plain_client(gateway.url) as http,
            ):
                await until_ready(http, _READY_S)
                yield Addresses(f"{gateway.url}/v1", gateway.grpc_address)
        finally:
            stop.set()


def _behind_the_gateway(
    common: dict[str, Any], folder: str, stop: asyncio.Event, mindie_shm: Path | None
) -> Iterator[Coroutine[Any, Any, object]]:
    """Every other service, each of which runs until `stop` is set. None freezes what there is (`gc.freeze`) when it has
    loaded: here it is to stay collectable.
    """

    def options(service: str, **own: Any) -> dict[str, Any]:
        return {**common, "listen": f"unix:{folder}/{service}", **own}

    decoder_loaded = asyncio.Event()
    yield scheduler.serve(SchedulerSettings(**options("scheduler")), stop, settle=_nothing)
    yield decoder.serve(
        DecoderSettings(**options("decoder", threads=1, shutdown_timeout=0.2)),
        stop,
        settle=decoder_loaded.set,
    )
    own = options("preprocess", media_workers=1, mindie_shm=mindie_shm)
    settings = PreprocessSettings(**own)
    yield preprocess.serve(settings, stop, settle=_nothing, start_worker=ForkedWorker.start)
    if registry.find(Checkpoint(common["model"])).takes_media:
        encoder = VisionEncoderSettings(**options("vision-encoder", threads=1))
        yield _serve_encoder(encoder, stop, decoder_loaded)


async def _serve_encoder(
    settings: VisionEncoderSettings, stop: asyncio.Event, decoder_loaded: asyncio.Event
) -> None:
    """transformers sets values of the whole process while it builds a model (the default dtype, whether weights are
    tied): two services of one process must not load at once."""
    await decoder_loaded.wait()
    await vision_encoder.serve(settings, stop, settle=_nothing)


def _nothing() -> None:
    pass
