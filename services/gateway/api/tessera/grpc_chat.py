"""The public gRPC door: translates to the fields of the REST door, so that both check and answer
alike.
"""

import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import grpc

from services.gateway.admission.admission import Admission
from services.gateway.admission.api_keys import ApiKeys
from services.gateway.admission.caller import tenant_of
from services.gateway.admission.model import ServedModel
from services.gateway.admission.request import ValidRequest
from services.gateway.admission.request_options import Terms, Timeouts, read_terms
from services.gateway.api.openai.requests import read_chat, read_completion
from services.gateway.api.tessera.grpc_events import events
from services.gateway.following.answer import Answer
from services.gateway.following.request_status import status_message
from services.gateway.following.resume import Resumption
from services.gateway.reading.list_limits import MOST_IDS, MOST_MESSAGES, MOST_PARTS
from services.gateway.telemetry.metrics import Metrics
from services.gateway.telemetry.request_log import log_refusal
from shared.errors import InvalidRequest, ServingError
from shared.queue.keys import model_tag, new_request_id
from shared.telemetry import request_names
from tessera.gateway.v1 import chat_pb2_grpc
from tessera.gateway.v1.chat_pb2 import (
    CancelRequestRequest,
    ChatEvent,
    ChatMessage,
    ChatRequest,
    CompleteRequest,
    ContentPart,
    FollowRequest,
    GenerationOptions,
    GetRequestRequest,
    ListModelsRequest,
    ListModelsResponse,
    Model,
    RequestStatus,
)

_REPEATED = ("stop", "stop_token_ids", "allowed_token_ids", "bad_token_ids", "bad_words")

Context = grpc.aio.ServicerContext[Any, ChatEvent]


class ChatServicer(chat_pb2_grpc.ChatServiceServicer):
    """tessera.gateway.v1.ChatService."""

    def __init__(
        self,
        model: ServedModel,
        admission: Admission,
        resumption: Resumption,
        metrics: Metrics,
        keys: ApiKeys,
        timeouts: Timeouts,
    ) -> None:
        self._model = model
        self._admission = admission
        self._resumption = resumption
        self._metrics = metrics
        self._keys = keys
        self._timeouts = timeouts
        self._tag = model_tag(model.name)

    async def Chat(self, request: ChatRequest, context: Context) -> AsyncIterator[ChatEvent]:
        """Answers a conversation."""
        content = _fields(request.model, request.options)
        if "logprobs" in content:  # one number here, two fields there
            content |= {"logprobs": True, "top_logprobs": content["logprobs"]}
        _require_most("messages", len(request.messages), MOST_MESSAGES)
        parts = sum(len(message.content) for message in request.messages)
        _require_most("messages", parts, MOST_PARTS, "parts in all")
        content["messages"] = [_message(message) for message in request.messages]
        async for event in self._answer(content, context, chat=True):
            yield event

    async def Complete(
        self, request: CompleteRequest, context: Context
    ) -> AsyncIterator[ChatEvent]:
        """Continues a prompt."""
        content = _fields(request.model, request.options)
        content["echo"] = request.echo
        kind = request.WhichOneof("prompt")
        if kind is not None:
            content["prompt"] = request.text if kind == "text" else list(request.token_ids.ids)
        async for event in self._answer(content, context, chat=False):
            yield event

    async def Follow(self, request: FollowRequest, context: Context) -> AsyncIterator[ChatEvent]:
        """Goes on with an answer."""
        answer = await self._resumption.follow(
            request.request_id, self._tenant(request.user, context), request.after, "after"
        )
        async for event in _events(answer, context):
            yield event

    async def GetRequest(self, request: GetRequestRequest, context: Any) -> RequestStatus:
        """What has become of a request."""
        tenant = self._tenant(request.user, context)
        return status_message(await self._resumption.find(request.request_id, tenant))

    async def CancelRequest(self, request: CancelRequestRequest, context: Any) -> RequestStatus:
        """Cancels a request."""
        tenant = self._tenant(request.user, context)
        return status_message(await self._resumption.cancel(request.request_id, tenant))

    async def ListModels(self, request: ListModelsRequest, context: Any) -> ListModelsResponse:
        """The one model there is."""
        self._keys.caller("", *_metadata(context))
        model = Model(id=self._model.name, max_model_len=self._model.max_model_len)
        return ListModelsResponse(models=[model])

    async def _answer(
        self, content: Mapping[str, Any], context: Context, *, chat: bool
    ) -> AsyncIterator[ChatEvent]:
        request_id, clients = new_request_id(self._tag), _clients_name(context)
        request_names.bind(request_id, clients)
        began, tenant = time.monotonic(), ""
        try:
            caller = self._keys.caller(request_id, *_metadata(context))
            caller = replace(caller, client_request_id=clients)
            request, terms = self._read(content, context, chat=chat)
            tenant = tenant_of(caller, request.user)
            answer = await self._admission.accept(request, caller, terms)
        except ServingError as error:
            path = "grpc Chat" if chat else "grpc Complete"
            log_refusal(error, time.monotonic() - began, tenant, path=path)
            raise
        async for event in _events(answer, context):
            yield event

    def _read(
        self, content: Mapping[str, Any], context: Context, *, chat: bool
    ) -> tuple[ValidRequest, Terms]:
        found = dict(context.invocation_metadata() or ())
        try:
            request = (read_chat if chat else read_completion)(content, self._model)
            terms = read_terms(
                lambda name: str(found.get(name, "")),
                content,
                self._timeouts,
                "chat" if chat else "complete",
            )
        except ServingError as error:
            self._metrics.rejected(error.reason)
            raise
        return request, terms

    def _tenant(self, user: str, context: Any) -> str:
        return tenant_of(self._keys.caller("", *_metadata(context)), user)


async def _events(answer: Answer, context: Context) -> AsyncIterator[ChatEvent]:
    # gRPC may drop this generator between two events without a word to it.
    context.add_done_callback(lambda _: answer.close())  # type: ignore[arg-type]
    try:
        async for event in events(answer):
            yield event
    finally:
        answer.close()


def _metadata(context: Any) -> tuple[str, str]:
    found = dict(context.invocation_metadata() or ())
    return str(found.get("authorization", "")), str(found.get("traceparent", ""))


def _clients_name(context: Any) -> str:
    found = dict(context.invocation_metadata() or ())
    return request_names.clients_name(str(found.get("x-request-id", "")))


def _fields(model: str, options: GenerationOptions) -> dict[str, Any]:
    """What is set, under the names of the REST door."""
    content: dict[str, Any] = {"model": model} if model else {}
    for field, value in options.ListFields():
        if field.name in _REPEATED:
            _require_most(field.name, len(value), MOST_IDS)
        if field.name == "early_stopping_never":  # one field there
            content["early_stopping"] = "never"
        elif field.name == "logit_bias":
            content[field.name] = {str(token): bias for token, bias in value.items()}
        else:
            content[field.name] = list(value) if field.name in _REPEATED else value
    return content


def _require_most(field: str, count: int, most: int, what: str = "entries") -> None:
    """Before a list of Python's own is made of it."""
    if count > most:
        message = f"{field} must not hold more than {most} {what}, not {count}"
        raise InvalidRequest("INVALID_VALUE", message, field=field)


def _message(message: ChatMessage) -> dict[str, Any]:
    return {"role": message.role, "content": [_part(part) for part in message.content]}


def _part(part: ContentPart) -> dict[str, Any]:
    match part.WhichOneof("part"):
        case "text":
            return {"type": "text", "text": part.text}
        case None:
            return {}
        case "image" | "image_url" as name:
            return {"type": "image_url", "image_url": getattr(part, name)}
        case name:
            return {"type": "video_url", "video_url": getattr(part, name)}
