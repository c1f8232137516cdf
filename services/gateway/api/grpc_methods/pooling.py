"""How methods of gRPC whose prompts become vectors are answered, whatever their API."""

import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol, TypeVar

from google.protobuf.message import Message

from services.gateway.admission.answer_limits import AnswerLimits
from services.gateway.admission.caller import tenant_of
from services.gateway.api.grpc_methods.calls import GrpcCalls, until_done
from services.gateway.api.pooling import READ_TIMES, PooledPrompt, PooledPrompts, Pooling
from services.gateway.reading.options import GenerationOptions
from services.gateway.reading.valid_request import ValidRequest
from shared.errors import InvalidRequest


class AskedPrompts(Protocol):
    """What a message asks for; `fields`: where it has each of the prompts, for errors about them."""

    @property
    def requests(self) -> Sequence[ValidRequest]:
        """One for each prompt."""

    @property
    def fields(self) -> Sequence[str]:
        """As many."""


_A = TypeVar("_A", bound=AskedPrompts)


class GrpcPooling:
    """An API gives it how it reads messages, and writes responses of the vectors that it gets."""

    def __init__(self, calls: GrpcCalls, pooling: Pooling, answer_limits: AnswerLimits) -> None:
        self._calls = calls
        self._pooling = pooling
        self._answer_limits = answer_limits

    async def answer(
        self,
        message: Message,
        read: Callable[[], tuple[_A, GenerationOptions]],
        method: str,
        context: Any,
    ) -> AsyncGenerator[tuple[_A, Sequence[PooledPrompt]], None]:
        """What `read` makes of the message, each time with what became of its next prompts. What was accepted ends with
        the call. Raises ServingError.
        """
        with self._calls.begun(method, context) as call, until_done(context) as held:
            asked, options = await self._calls.read(message, read, method, context, READ_TIMES)
            with self._calls.counted():
                if options.last_event_id:
                    name = "Last-Event-ID"
                    raise InvalidRequest(
                        "INVALID_HEADER", f"{name} is for answers: leave it out", field=name
                    )
                size = self._answer_limits.take(asked.requests, self._pooling.model)
            held.callback(self._answer_limits.give_back, size)
            call.tenant = tenant_of(call.caller, asked.requests[0].user)

            def accepted(is_last: bool) -> None:
                call.accepted = True

            prompts = PooledPrompts(asked.requests, asked.fields, options)
            groups = self._pooling.pool(prompts, call.caller, accepted)
            async with contextlib.aclosing(groups):
                async for found in groups:
                    yield asked, found
