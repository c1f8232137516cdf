"""Preprocess and vision encoder, played: where pictures become places in a prompt, and rows of embeddings.

A picture is some bytes; its digest says what its rows hold. An encoder loses all it has made when it dies.
"""

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import numpy as np

from shared.artifacts.embedding_name import embedding_name
from shared.errors import NotFound, Overloaded
from shared.net.rpc.server import RpcServer
from shared.queue import connect
from shared.queue.keys import Keys, new_instance_id
from shared.queue.registry import Announcement
from shared.queue.token_log import encode_tokens
from tessera.artifact.v1 import artifact_pb2_grpc
from tessera.artifact.v1.artifact_pb2 import (
    ArtifactLocation,
    ArtifactRef,
    FetchArtifactRequest,
    FetchArtifactResponse,
    MakeRoomRequest,
    MakeRoomResponse,
)
from tessera.common.v1.media_pb2 import MediaItem
from tessera.preprocess.v1 import preprocess_pb2_grpc
from tessera.preprocess.v1.preprocess_pb2 import (
    GetPixelsRequest,
    GetPixelsResponse,
    PrepareManyRequest,
    PrepareManyResponse,
    PrepareRequest,
    PrepareResponse,
    PrepareResult,
)
from tessera.vision_encoder.v1 import vision_encoder_pb2_grpc
from tessera.vision_encoder.v1.vision_encoder_pb2 import (
    EncodeRequest,
    EncodeResponse,
    ReleaseRequest,
    ReleaseResponse,
)
from tests.simulation.processes.arithmetic import HIDDEN, NUMERICS
from tests.support.arithmetic.model import picture_value

if TYPE_CHECKING:
    from tests.simulation.world import World

PLACEHOLDER = 3
ROWS = 5


def digest_of(picture: bytes) -> bytes:
    """16 bytes that name what an encoder makes of a picture."""
    return hashlib.blake2b(picture, digest_size=16).digest()


def picture_values(picture: bytes, content: bytes, numerics: str = NUMERICS) -> list[int]:
    """What stands in the places of a picture, encoded with these weights and numerics."""
    name = embedding_name(content, digest_of(picture), numerics)
    return [picture_value(name, row) for row in range(ROWS)]


def prompt_of(request: PrepareRequest) -> PrepareResponse:
    """Numbers in texts are token ids, a picture is ROWS places."""
    tokens: list[int] = []
    media: list[MediaItem] = []
    for message in request.conversation.messages:
        for part in message.content:
            if part.WhichOneof("part") == "text":
                tokens += map(int, part.text.split())
                continue
            data = part.media.data
            item = MediaItem(digest=digest_of(data), source_digest=digest_of(data) * 2)
            item.offset, item.length, item.rows = len(tokens), ROWS, ROWS
            media.append(item)
            tokens += [PLACEHOLDER] * ROWS
    return PrepareResponse(token_ids=encode_tokens(tokens), media=media)


class _Preprocess(preprocess_pb2_grpc.PreprocessServiceServicer):
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    async def Prepare(self, request: PrepareRequest, context: Any) -> PrepareResponse:
        await asyncio.sleep(self._rng.uniform(0.001, 0.08))
        return prompt_of(request)

    async def GetPixels(self, request: GetPixelsRequest, context: Any) -> GetPixelsResponse:
        raise NotImplementedError  # its encoders make embeddings of the picture's bytes

    async def PrepareMany(
        self, requests: AsyncIterator[PrepareManyRequest], context: Any
    ) -> AsyncIterator[PrepareManyResponse]:
        async for some in requests:
            await asyncio.sleep(self._rng.uniform(0.001, 0.02))
            results = [PrepareResult(prepared=prompt_of(prompt)) for prompt in some.prompts]
            yield PrepareManyResponse(results=results)


class _Encoder(
    vision_encoder_pb2_grpc.VisionEncoderServiceServicer,
    artifact_pb2_grpc.ArtifactServiceServicer,
):
    def __init__(self, address: str, rng: random.Random) -> None:
        self._address = address
        self._rng = rng
        self._made: dict[bytes, bytes] = {}

    async def Encode(self, request: EncodeRequest, context: Any) -> EncodeResponse:
        digest = embedding_name(request.content, bytes(request.media.digest), request.numerics)
        cached = digest in self._made
        if not cached:
            if self._rng.random() < 0.1:
                raise Overloaded("ENCODER_FULL", "everything is held", retry_after_s="1")
            await asyncio.sleep(self._rng.uniform(0.02, 0.3))
            rows = np.zeros((request.media.rows, HIDDEN), "<f4")
            rows[:, 0] = [picture_value(digest, row) for row in range(request.media.rows)]
            self._made[digest] = rows.tobytes()
        ref = ArtifactRef(
            digest=digest,
            dtype="float32",
            shape=[request.media.rows, HIDDEN],
            size_bytes=len(self._made[digest]),
            location=ArtifactLocation(address=self._address),
        )
        return EncodeResponse(embeddings=ref, cached=cached)

    async def Release(self, request: ReleaseRequest, context: Any) -> ReleaseResponse:
        for digest in request.digests:
            if self._rng.random() < 0.5:  # sooner or later
                self._made.pop(bytes(digest), None)
        return ReleaseResponse()

    async def FetchArtifact(
        self, request: FetchArtifactRequest, context: Any
    ) -> AsyncIterator[FetchArtifactResponse]:
        data = self._made.get(bytes(request.digest))
        if data is None:
            raise NotFound("ARTIFACT_GONE", "no such artifact here any more")
        yield FetchArtifactResponse(data=data)

    async def MakeRoom(self, request: MakeRoomRequest, context: Any) -> MakeRoomResponse:
        return MakeRoomResponse()  # nothing of this is in files


async def serve_preprocess(world: "World", address: str, model: str, stop: asyncio.Event) -> None:
    """Runs until `stop` is set."""
    async with RpcServer(address, grace_s=0.5) as server:
        server.add(
            "tessera.preprocess.v1.PreprocessService",
            preprocess_pb2_grpc.add_PreprocessServiceServicer_to_server,
            _Preprocess(random.Random(f"{world.seed}/{address}")),
        )
        await _announced(server, "preprocess", model, stop)


async def serve_encoder(world: "World", address: str, model: str, stop: asyncio.Event) -> None:
    """Runs until `stop` is set."""
    async with RpcServer(address, grace_s=0.5) as server:
        encoder = _Encoder(server.address, random.Random(f"{world.seed}/{address}"))
        server.add(
            "tessera.vision_encoder.v1.VisionEncoderService",
            vision_encoder_pb2_grpc.add_VisionEncoderServiceServicer_to_server,
            encoder,
        )
        server.add(
            "tessera.artifact.v1.ArtifactService",
            artifact_pb2_grpc.add_ArtifactServiceServicer_to_server,
            encoder,
        )
        await _announced(server, "vision_encoder", model, stop, world.encoder_numerics(address))


async def _announced(
    server: RpcServer, service: str, model: str, stop: asyncio.Event, numerics: str = ""
) -> None:
    await server.ready()
    redis = connect("redis://simulated")
    announcement = Announcement(
        redis, Keys(model), service, new_instance_id(), server.address, numerics=numerics
    )
    async with announcement:
        await stop.wait()
    await redis.aclose()
