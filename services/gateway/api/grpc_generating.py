"""What methods of gRPC that generate share: the caller, the request's options, admission, and the end of the call."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from google.protobuf.message import Message

from services.gateway.admission.admission import Admission
from services.gateway.admission.answer_limits import AnswerLimits
from services.gateway.admission.api_keys import ApiKeys
from services.gateway.admission.caller import Caller, Header, tenant_of
from services.gateway.admission.request_options import (
    RequestOptions,
    Timeouts,
    digest,
    read_request_options,
)
from services.gateway.decoding.decode import in_thread, is_large
from services.gateway.following.answer import Answer
from services.gateway.model.served_model import ServedModel
from services.gateway.reading.options import GenerationOptions
from services.gateway.reading.sampling.bad_words import BAD_WORDS_TIMES
from services.gateway.reading.valid_request import ValidRequest
from services.gateway.telemetry.metrics import Metrics
from services.gateway.telemetry.request_log import log_refusal
from shared.environment import monotonic
from shared.errors import ServingError
from shared.queue.keys import model_tag, new_request_id
from shared.telemetry import request_names

# A validated request, and the options that it was made of.
Read = tuple[ValidRequest, GenerationOptions]


class GrpcGenerating:
    """An API gives it how it reads messages, and writes responses of the answers that it gets."""

    def __init__(
        self,
        model: ServedModel,
        admission: Admission,
        metrics: Metrics,
        keys: ApiKeys,
        answer_limits: AnswerLimits,
        timeouts: Timeouts,
    ) -> None:
        """`timeouts` are the server's own."""
        self._model = model
        self._admission = admission
        self._metrics = metrics
        self._keys = keys
        self._answer_limits = answer_limits
        self._timeouts = timeouts
        self._tag = model_tag(model.name)

    def caller(self, context: Any) -> Caller:
        """Who calls. Raises Unauthenticated."""
        return self._keys.caller("", _metadata(context))

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
        client_request_id = request_names.clients_name(_metadata(context)("x-request-id"))
        request_id = new_request_id(self._tag)
        request_names.bind(request_id, client_request_id)
        began, tenant = monotonic(), ""
        try:
            caller = self._keys.caller(request_id, _metadata(context))
            caller = replace(caller, client_request_id=client_request_id)
            work = partial(self._read, message, read, method, context)
            words = getattr(getattr(message, "options", None), "bad_words", None)
            large = is_large(message.ByteSize() * (BAD_WORDS_TIMES if words else 1))
            request, options = await in_thread(work) if large else work()
            tenant = tenant_of(caller, request.user)
            if held is not None and not request.stream:
                held.callback(self._answer_limits.give_back, self._take(request))
            return await self._admission.accept(request, caller, options)
        except ServingError as error:
            log_refusal(error, monotonic() - began, tenant, path=f"grpc {method.capitalize()}")
            raise

    def _take(self, request: ValidRequest) -> int:
        try:
            return self._answer_limits.take([request], self._model)
        except ServingError as error:
            self._metrics.rejected(error.reason)
            raise

    def _read(
        self, message: Message, read: Callable[[], Read], method: str, context: Any
    ) -> tuple[ValidRequest, RequestOptions]:
        try:
            request, generation = read()
            options = read_request_options(
                _metadata(context),
                generation,
                self._timeouts,
                lambda: digest(method.encode() + message.SerializeToString(deterministic=True)),
            )
        except ServingError as error:
            self._metrics.rejected(error.reason)
            raise
        return request, options


@contextlib.contextmanager
def until_done(context: Any) -> Iterator[ExitStack]:
    """What is to be done at the end of the block, or of the call: gRPC may drop a generator between two responses
    without closing it.
    """
    # The call keeps the callback until garbage is collected: that refers to an answer only as long as it is open.
    stack = ExitStack()
    context.add_done_callback(lambda _: stack.close())
    with stack:
        yield stack


@contextlib.contextmanager
def closing(answer: Answer, context: Any) -> Iterator[Answer]:
    """Closes the answer at the end of the block, or of the call."""
    with until_done(context) as stack:
        stack.callback(answer.close)
        yield answer


def _metadata(context: Any) -> Header:
    found = dict(context.invocation_metadata() or ())
    return lambda name: str(found.get(name, ""))
