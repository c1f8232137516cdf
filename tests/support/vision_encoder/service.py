"""A running vision_encoder service on a unix socket, and calls to it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc.aio
import numpy as np
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.vision_encoder.server import serve
from services.vision_encoder.settings import VisionEncoderSettings
from shared.artifacts.store import ArtifactReader
from shared.net.channels import open_channel
from shared.net.rpc.errors import calling
from tessera.common.v1.media_pb2 import MediaItem
from tessera.vision_encoder.v1.vision_encoder_pb2 import (
    EncodeRequest,
    EncodeResponse,
    ReleaseRequest,
)
from tessera.vision_encoder.v1.vision_encoder_pb2_grpc import VisionEncoderServiceStub

if TYPE_CHECKING:  # of a stub file
    from tessera.vision_encoder.v1.vision_encoder_pb2_grpc import VisionEncoderServiceAsyncStub


@dataclass
class RunningEncoder:
    """The service's stub and address."""

    stub: "VisionEncoderServiceAsyncStub"
    reader: ArtifactReader
    address: str

    async def encode(
        self, item: MediaItem, retain_s: int = 60, content: bytes = b"", numerics: str = ""
    ) -> EncodeResponse:
        """One call; errors are raised as the service raised them."""
        retention = Duration(seconds=retain_s)
        request = EncodeRequest(media=item, retention=retention, content=content, numerics=numerics)
        with calling("vision_encoder"):
            response: EncodeResponse = await self.stub.Encode(request, timeout=60)
        return response

    async def rows(self, item: MediaItem) -> np.ndarray[Any, Any]:
        """The embeddings of an item."""
        array = await self.reader.open((await self.encode(item)).embeddings)
        return np.array(array)

    async def release(self, *items: MediaItem) -> None:
        """Ends the holds on items."""
        await self.stub.Release(ReleaseRequest(digests=[item.digest for item in items]))


EncoderMaker = Callable[..., AbstractAsyncContextManager[RunningEncoder]]


@contextlib.asynccontextmanager
async def running(settings: VisionEncoderSettings) -> AsyncIterator[RunningEncoder]:
    """The service until the block is left; it must start and stop cleanly."""
    stop = asyncio.Event()
    task = asyncio.create_task(serve(settings, stop))
    channel = open_channel(settings.listen)
    reader = ArtifactReader()
    try:
        await _serving(channel, task)
        yield RunningEncoder(VisionEncoderServiceStub(channel), reader, settings.listen)
    finally:
        await reader.close()
        await channel.close()
        stop.set()
        await task


async def _serving(channel: grpc.aio.Channel, task: asyncio.Task[None]) -> None:
    health: Any = health_pb2_grpc.HealthStub(channel)
    while True:
        if task.done():
            await task
        with contextlib.suppress(grpc.aio.AioRpcError):
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=5)
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return
        await asyncio.sleep(0.02)
