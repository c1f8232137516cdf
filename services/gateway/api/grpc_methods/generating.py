"""How methods of gRPC that generate are answered, whatever their API."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from google.protobuf.message import Message

from services.gateway.admission.admission import Admission
from services.gateway.admission.answer_limits import AnswerLimits
from services.gateway.admission.caller import Caller, tenant_of
from services.gateway.api.grpc_methods.calls import GrpcCalls, until_done
from services.gateway.following.answer import Answer
from services.gateway.model.served_model import ServedModel
from services.gateway.reading.options import GenerationOptions
from services.gateway.reading.sampling.bad_words import BAD_WORDS_TIMES
from services.gateway.reading.valid_request import ValidRequest

# A validated request, and the options that it was made of.
Read = tuple[ValidRequest, GenerationOptions]


class GrpcGenerating:
    """An API gives it how it reads messages, and writes responses of the answers that it gets."""

    def __init__(
        self,
        model: ServedModel,
        admission: Admission,
        answer_limits: AnswerLimits,
        calls: GrpcCalls,
    ) -> None:
        self._model = model
        self._admission = admission
        self._answer_limits = answer_limits
        self._calls = calls

    def caller(self, context: Any) -> Caller:
        """Who calls. Raises Unauthenticated."""
        return self._calls.caller(context)

    async def accept(
        self,
        message: Message,
        read: Callable[[], Read],
        method: str,
        context: Any,
        held: ExitStack | None = None,
    ) -> Answer:
        """Admits what `read` makes of the message. The answer must be closed. `held` gives back at its end what an
        answer reserves that is sent whole. Raises ServingError.
        """
        with self._calls.begun(method, context) as call:
            words = getattr(getattr(message, "options", None), "bad_words", None)
            times = BAD_WORDS_TIMES if words else 1
            request, options = await self._calls.read(message, read, method, context, times)
            call.tenant = tenant_of(call.caller, request.user)
            if held is not None and not request.stream:
                with self._calls.counted():
                    size = self._answer_limits.take([request], self._model)
                held.callback(self._answer_limits.give_back, size)
            return await self._admission.accept(request, call.caller, options)


@contextlib.contextmanager
def closing(answer: Answer, context: Any) -> Iterator[Answer]:
    """Closes the answer at the end of the block, or of the call."""
    with until_done(context) as stack:
        stack.callback(answer.close)
        yield answer
