"""A running preprocess service on a unix socket, and calls to it."""

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc.aio
import numpy as np
import PIL.Image
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.preprocess.server import serve
from services.preprocess.settings import PreprocessSettings
from shared.net.channels import open_channel
from shared.net.rpc.errors import calling
from tessera.preprocess.v1.preprocess_pb2 import (
    Conversation,
    Media,
    Message,
    Part,
    PrepareRequest,
    PrepareResponse,
)
from tessera.preprocess.v1.preprocess_pb2_grpc import PreprocessServiceStub
from tests.support.preprocess.forked_workers import ForkedWorker

if TYPE_CHECKING:  # of a stub file
    from tessera.preprocess.v1.preprocess_pb2_grpc import PreprocessServiceAsyncStub


@dataclass
class RunningPreprocess:
    """The service's stub and address."""

    stub: "PreprocessServiceAsyncStub"
    channel: grpc.aio.Channel
    address: str

    async def prepare(self, request: PrepareRequest) -> PrepareResponse:
        """One call; errors are raised as the service raised them."""
        with calling("preprocess"):
            response: PrepareResponse = await self.stub.Prepare(request, timeout=60)
        return response

    async def chat(self, *messages: Message, **fields: Any) -> PrepareResponse:
        """Prepares a conversation."""
        return await self.prepare(
            PrepareRequest(conversation=Conversation(messages=messages, **fields))
        )


PreprocessMaker = Callable[..., AbstractAsyncContextManager[RunningPreprocess]]


@contextlib.asynccontextmanager
async def running(settings: PreprocessSettings) -> AsyncIterator[RunningPreprocess]:
    """The service until the block is left; it must start and stop cleanly."""
    stop = asyncio.Event()
    task = asyncio.create_task(serve(settings, stop, start_worker=ForkedWorker.start))
    channel = open_channel(settings.listen, 64 << 20)
    try:
        health: Any = health_pb2_grpc.HealthStub(channel)
        while True:
            if task.done():
                await task
            answer = None
            with contextlib.suppress(grpc.aio.AioRpcError):
                answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=5)
            if answer and answer.status == health_pb2.HealthCheckResponse.SERVING:
                break
            await asyncio.sleep(0.02)
        yield RunningPreprocess(PreprocessServiceStub(channel), channel, settings.listen)
    finally:
        await channel.close()
        stop.set()
        await task


def text(words: str) -> Part:
    """A text part."""
    return Part(text=words)


def image(data: bytes, field: str = "messages[0].content[0].image_url") -> Part:
    """An image part with the file's bytes."""
    return Part(media=Media(data=data, field=field))


def image_at(url: str, field: str = "messages[0].content[0].image_url") -> Part:
    """An image part with an address."""
    return Part(media=Media(url=url, field=field))


def turn(role: str, *parts: Part) -> Message:
    """One message."""
    return Message(role=role, content=parts)


def picture(width: int = 80, height: int = 60, seed: int = 0) -> PIL.Image.Image:
    """A random picture."""
    values = np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)
    return PIL.Image.fromarray(values)


def file_of(image: PIL.Image.Image, style: str = "PNG", **options: Any) -> bytes:
    """The picture as a file."""
    buffer = io.BytesIO()
    image.save(buffer, style, **options)
    return buffer.getvalue()


def ids_of(response: PrepareResponse) -> list[int]:
    """The prompt's token ids."""
    ids: list[int] = np.frombuffer(response.token_ids, "<i4").tolist()
    return ids
