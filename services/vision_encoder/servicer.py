"""VisionEncoderService: one media item in, one embedding artifact out."""

from collections.abc import Collection
from typing import Any

import grpc.aio
import structlog

from services.vision_encoder.embedding_producer import EmbeddingProducer
from shared.artifacts.file import DIGEST_BYTES
from shared.errors import InvalidRequest, NotFound, Precondition
from shared.prompts.modality import modality_of, require_taken
from tessera.common.v1.media_pb2 import Modality
from tessera.vision_encoder.v1 import vision_encoder_pb2_grpc
from tessera.vision_encoder.v1.vision_encoder_pb2 import (
    EncodeRequest,
    EncodeResponse,
    ReleaseRequest,
    ReleaseResponse,
)

log = structlog.get_logger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]


class VisionEncoderServicer(vision_encoder_pb2_grpc.VisionEncoderServiceServicer):
    """`encoder` is None for a text-only checkpoint; `content` is the digest of its weights, empty where not known;
    `numerics` what else the bits of its rows depend on; `modalities` are those that the model takes.
    """

    def __init__(
        self,
        encoder: EmbeddingProducer | None,
        modalities: Collection[Modality.ValueType],
        model_name: str,
        content: bytes = b"",
        numerics: str = "",
    ) -> None:
        self._encoder = encoder
        self._modalities = modalities
        self._model_name = model_name
        self._content = content
        self._numerics = numerics

    async def Encode(self, request: EncodeRequest, context: _Context) -> EncodeResponse:
        """Raises InvalidRequest for a modality that the model does not take, Overloaded while everything is retained,
        Precondition when the rows are not those promised, NotFound where the decoder's weights are not those of this
        encoder, or the numerics that it was chosen for are not its own.
        """
        if self._encoder is None:
            raise Precondition("TEXT_ONLY_MODEL", f"{self._model_name} has no vision part")
        if len(request.media.digest) != DIGEST_BYTES or request.media.rows <= 0:
            raise InvalidRequest(
                "BAD_MEDIA",
                "media needs a digest of 16 bytes and its number of rows",
                field="media",
            )
        require_taken(modality_of(request.media), self._modalities, self._model_name, "media")
        if request.content and self._content and request.content != self._content:
            raise NotFound(
                "OTHER_CONTENT",
                f"this encoder has the weights {self._content.hex()}, the decoder has {request.content.hex()}",
            )
        if request.numerics not in ("", self._numerics):
            raise NotFound(
                "OTHER_NUMERICS",
                f"this encoder computes in {self._numerics!r}, embeddings of {request.numerics!r} are asked for",
            )
        retain_s = request.retention.seconds + request.retention.nanos / 1e9
        made = await self._encoder.encode(
            request.media, retain_s, request.content, request.numerics
        )
        log.debug(
            "encoded",
            digest=request.media.digest.hex(),
            rows=request.media.rows,
            cached=made.cached,
            encode_us=made.encode_us,
        )
        return EncodeResponse(
            embeddings=made.ref,
            cached=made.cached,
            encode_us=made.encode_us,
            queue_us=made.queue_us,
            batch_items=made.items,
        )

    async def Release(self, request: ReleaseRequest, context: _Context) -> ReleaseResponse:
        """Ends retention; unknown digests are ignored."""
        if self._encoder is not None:
            for digest in request.digests:
                self._encoder.release(digest)
        return ReleaseResponse()
