"""The public gRPC API."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import Message

from services.gateway.admission.admission import Admission
from services.gateway.admission.api_keys import ApiKeys
from services.gateway.admission.caller import Header, tenant_of
from services.gateway.admission.request_options import (
    RequestOptions,
    Timeouts,
    digest,
    read_request_options,
)
from services.gateway.admission.resume import Resumption
from services.gateway.api.tessera.grpc_events import events
from services.gateway.api.tessera.grpc_requests import read_chat, read_complete, read_options
from services.gateway.api.tessera.request_status import status_message
from services.gateway.decoding.decode import in_thread, is_large
from services.gateway.following.answer import Answer
from services.gateway.model.served_model import ServedModel
from services.gateway.reading.options import GenerationOptions
from services.gateway.reading.valid_request import ValidRequest
from services.gateway.telemetry.metrics import Metrics
from services.gateway.telemetry.request_log import log_refusal
from services.gateway.telemetry.served_parts import ServedParts
from shared.environment import monotonic
from shared.errors import ServingError
from shared.queue.keys import model_tag, new_request_id
from shared.telemetry import request_names
from tessera.gateway.v1 import chat_pb2_grpc
from tessera.gateway.v1.chat_pb2 import (
    CancelRequestRequest,
    ChatEvent,
    ChatRequest,
    CompleteRequest,
    FollowRequest,
    GetRequestRequest,
    ListModelsRequest,
    ListModelsResponse,
    Model,
    ModelPart,
    RequestStatus,
)

# A validated request, and the options that it was made of.
Read = tuple[ValidRequest, GenerationOptions]
Context = grpc.aio.ServicerContext[Any, ChatEvent]


class ChatServicer(chat_pb2_grpc.ChatServiceServicer):
    """tessera.gateway.v1.ChatService."""

    def __init__(
        self,
        model: ServedModel,
        parts: ServedParts,
        admission: Admission,
        resumption: Resumption,
        metrics: Metrics,
        keys: ApiKeys,
        timeouts: Timeouts,
    ) -> None:
        self._model = model
        self._parts = parts
        self._admission = admission
        self._resumption = resumption
        self._metrics = metrics
        self._keys = keys
        self._timeouts = timeouts
        self._tag = model_tag(model.name)

    async def Chat(self, request: ChatRequest, context: Context) -> AsyncIterator[ChatEvent]:
        """Answers a conversation."""

        def read() -> Read:
            options = read_options(request.model, request.options)
            return read_chat(request, options, self._model), options

        async for event in self._answer(request, read, "chat", context):
            yield event

    async def Complete(
        self, request: CompleteRequest, context: Context
    ) -> AsyncIterator[ChatEvent]:
        """Continues a prompt."""

        def read() -> Read:
            options = read_options(request.model, request.options, echo=request.echo)
            return read_complete(request, options, self._model), options

        async for event in self._answer(request, read, "complete", context):
            yield event

    async def Follow(self, request: FollowRequest, context: Context) -> AsyncIterator[ChatEvent]:
        """Goes on with an answer."""
        answer = await self._resumption.follow(
            request.request_id, self._tenant(request.user, context), request.after, "after"
        )
        async for event in _events(answer, context):
            yield event

    async def GetRequest(self, request: GetRequestRequest, context: Any) -> RequestStatus:
        """The state of a request."""
        tenant = self._tenant(request.user, context)
        return status_message(await self._resumption.find(request.request_id, tenant))

    async def CancelRequest(self, request: CancelRequestRequest, context: Any) -> RequestStatus:
        """Cancels a request."""
        tenant = self._tenant(request.user, context)
        return status_message(await self._resumption.cancel(request.request_id, tenant))

    async def ListModels(self, request: ListModelsRequest, context: Any) -> ListModelsResponse:
        """The one model there is."""
        self._keys.caller("", _metadata(context))
        parts = {name: _part(said) for name, said in (await self._parts.now()).items()}
        model = Model(id=self._model.name, max_model_len=self._model.max_model_len, parts=parts)
        return ListModelsResponse(models=[model])

    async def _answer(
        self, message: Message, read: Callable[[], Read], method: str, context: Context
    ) -> AsyncIterator[ChatEvent]:
        """Admits what `read` makes of the message, and streams its events."""
        request_id, client_request_id = new_request_id(self._tag), _client_request_id(context)
        request_names.bind(request_id, client_request_id)
        began, tenant = monotonic(), ""
        try:
            caller = self._keys.caller(request_id, _metadata(context))
            caller = replace(caller, client_request_id=client_request_id)
            work = partial(self._read, message, read, method, context)
            large = is_large(message.ByteSize())
            request, options = await in_thread(work) if large else work()
            tenant = tenant_of(caller, request.user)
            answer = await self._admission.accept(request, caller, options)
        except ServingError as error:
            path = f"grpc {method.capitalize()}"
            log_refusal(error, monotonic() - began, tenant, path=path)
            raise
        async for event in _events(answer, context):
            yield event

    def _read(
        self, message: Message, read: Callable[[], Read], method: str, context: Context
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

    def _tenant(self, user: str, context: Any) -> str:
        return tenant_of(self._keys.caller("", _metadata(context)), user)


def _part(said: Mapping[str, Any]) -> ModelPart:
    return ModelPart(
        code=said["code"],
        off=said["off"],
        largest_difference=said.get("largest_difference"),
        ranks=said.get("ranks"),
    )


async def _events(answer: Answer, context: Context) -> AsyncIterator[ChatEvent]:
    # gRPC may drop this generator between two events without closing it. It keeps the callback until garbage is
    # collected: that refers to the answer only as long as it is open.
    open_answer = ExitStack()
    open_answer.callback(answer.close)
    context.add_done_callback(lambda _: open_answer.close())  # type: ignore[arg-type]
    with open_answer:
        async for event in events(answer):
            yield event


def _metadata(context: Any) -> Header:
    found = dict(context.invocation_metadata() or ())
    return lambda name: str(found.get(name, ""))


def _client_request_id(context: Any) -> str:
    return request_names.clients_name(_metadata(context)("x-request-id"))
