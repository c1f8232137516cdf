"""Vectors and scores over gRPC."""

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

import grpc
import numpy as np

from services.gateway.api.grpc_methods.pooling import GrpcPooling
from services.gateway.api.pooling import PooledPrompt, Pooling
from services.gateway.api.tessera.grpc_vector_requests import read_pool, read_rerank, read_score
from services.gateway.reading.options import GenerationOptions
from services.gateway.reading.pooling.scored_texts import ScoredTexts, ranked
from tessera.gateway.v1 import vectors_pb2_grpc
from tessera.gateway.v1.vectors_pb2 import (
    PoolEvent,
    PoolRequest,
    PoolUsage,
    RankedDocument,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
    Vector,
)

Context = grpc.aio.ServicerContext[Any, Any]


class VectorServicer(vectors_pb2_grpc.VectorServiceServicer):
    """tessera.gateway.v1.VectorService."""

    def __init__(self, pooling: Pooling, calls: GrpcPooling) -> None:
        self._pooling = pooling
        self._calls = calls

    async def Pool(self, request: PoolRequest, context: Context) -> AsyncIterator[PoolEvent]:
        """Vectors."""
        read = partial(read_pool, request, self._pooling)
        index = tokens = 0
        groups = self._calls.answer(request, read, "pool", context)
        async with contextlib.aclosing(groups):
            async for asked, found in groups:
                for one in found:
                    values = asked.finish(one.vector)
                    label = asked.labels[int(np.argmax(values))] if asked.labels else ""
                    vector = Vector(index=index, values=values.tolist(), label=label)
                    yield PoolEvent(vector=vector)
                    index, tokens = index + 1, tokens + one.tokens
        yield PoolEvent(usage=PoolUsage(prompt_tokens=tokens))

    async def Score(self, request: ScoreRequest, context: Context) -> ScoreResponse:
        """Scores in the order of the texts."""
        read = partial(read_score, request, self._pooling)
        scores, usage = await self._scores(request, read, "score", context)
        return ScoreResponse(scores=scores, usage=usage)

    async def Rerank(self, request: RerankRequest, context: Context) -> RerankResponse:
        """Texts, the best first."""
        read = partial(read_rerank, request, self._pooling)
        scores, usage = await self._scores(request, read, "rerank", context)
        most = request.top_n or None
        results = [
            RankedDocument(index=index, relevance_score=scores[index])
            for index in ranked(scores, most)
        ]
        return RerankResponse(results=results, usage=usage)

    async def _scores(
        self,
        request: ScoreRequest | RerankRequest,
        read: Callable[[], tuple[ScoredTexts, GenerationOptions]],
        method: str,
        context: Context,
    ) -> tuple[Sequence[float], PoolUsage]:
        found: list[PooledPrompt] = []
        asked: ScoredTexts | None = None
        groups = self._calls.answer(request, read, method, context)
        async with contextlib.aclosing(groups):
            async for given, some in groups:
                asked = given
                found += some
        assert asked is not None  # there is at least one text
        usage = PoolUsage(prompt_tokens=sum(one.tokens for one in found))
        return asked.scores([one.vector for one in found]), usage
