"""Short prompts to one preprocess replica: those that come while an answer is awaited leave together."""

import asyncio
from typing import Any

import grpc.aio
import structlog

from shared.environment import monotonic
from shared.errors import Expired, Internal, ServingError, Unavailable, from_failure
from shared.net import tasks
from shared.net.rpc.errors import calling
from tessera.preprocess.v1.preprocess_pb2 import (
    PrepareManyRequest,
    PrepareRequest,
    PrepareResponse,
    PrepareResult,
)
from tessera.preprocess.v1.preprocess_pb2_grpc import PreprocessServiceStub

log = structlog.get_logger(__name__)

_MOST = 64  # prompts in a message
# The replica ends connections that are half a minute old, so that callers find new replicas, and a stream on such a
# connection some time later.
_RENEW_S = 20.0


class PromptStream:
    """One stream at a time, one message under way at a time."""

    def __init__(self, channel: grpc.aio.Channel, peer: str, renew_s: float = _RENEW_S) -> None:
        """`peer` is the replica's name in errors; a stream that is older than `renew_s` is not used again."""
        self._stub = PreprocessServiceStub(channel)
        self._peer = peer
        self._renew_s = renew_s
        self._waiting: list[tuple[PrepareRequest, asyncio.Future[PrepareResult]]] = []
        self._task: asyncio.Task[None] | None = None
        self._call: Any = None
        self._call_since = 0.0

    async def prepare(self, request: PrepareRequest, timeout_s: float) -> PrepareResponse:
        """Prepares a prompt. Raises what the replica said, Unavailable when it is away, Expired."""
        answer: asyncio.Future[PrepareResult] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        if self._task is None or self._task.done():
            self._task = tasks.begin(self._work())
        try:
            async with asyncio.timeout(timeout_s):
                result = await answer
        except TimeoutError:
            raise Expired("PREPARE_TIMEOUT", f"{self._peer} did not answer in time") from None
        if result.HasField("failure"):
            raise from_failure(result.failure)
        return result.prepared

    async def close(self) -> None:
        """Ends the stream; prompts under way fail."""
        await tasks.end(self._task)
        self._hang_up()
        gone = Unavailable("PREPROCESS_GONE", f"the stream to {self._peer} is closed")
        for _, answer in self._waiting:
            _fail(answer, gone)

    async def _work(self) -> None:
        """Until nothing waits any more."""
        while self._waiting:
            batch = self._waiting[:_MOST]
            try:
                results = await self._ask([prompt for prompt, _ in batch])
            except ServingError as error:
                for _, answer in batch:
                    _fail(answer, error)
            except Exception as error:  # the waiting prompts must not wait forever
                log.exception("prompts were not prepared", prompts=len(batch))
                self._hang_up()
                why = f"the prompt was not prepared: {type(error).__name__}"
                for _, answer in batch:
                    _fail(answer, Internal("PREPARE_FAILED", why))
            else:
                for (_, answer), result in zip(batch, results, strict=True):
                    if not answer.done():  # the caller may have left
                        answer.set_result(result)
            del self._waiting[: len(batch)]

    async def _ask(self, prompts: list[PrepareRequest]) -> list[PrepareResult]:
        """Tries again where a stream that served before turns out to have ended since."""
        if monotonic() - self._call_since > self._renew_s:
            self._hang_up()
        has_served = self._call is not None
        try:
            return await self._exchange(prompts)
        except Unavailable:
            self._hang_up()
            if not has_served:
                raise
            return await self._exchange(prompts)

    async def _exchange(self, prompts: list[PrepareRequest]) -> list[PrepareResult]:
        if self._call is None:
            self._call, self._call_since = self._stub.PrepareMany(), monotonic()
        try:
            with calling(self._peer):
                await self._call.write(PrepareManyRequest(prompts=prompts))
                response = await self._call.read()
        except asyncio.InvalidStateError:  # it had ended before
            response = grpc.aio.EOF
        if response is grpc.aio.EOF or len(response.results) != len(prompts):
            raise Unavailable("PREPROCESS_GONE", f"{self._peer} ended the stream")
        return list(response.results)

    def _hang_up(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = None


def _fail(answer: "asyncio.Future[PrepareResult]", error: ServingError) -> None:
    if not answer.done():
        answer.set_exception(error)
