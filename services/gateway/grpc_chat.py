"""The public gRPC door: translates to the fields of the REST door, so that both check and answer
alike.
"""

from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc

from services.gateway.admission import Admission
from services.gateway.answer import Answer, Piece
from services.gateway.api_keys import ApiKeys
from services.gateway.metrics import Metrics
from services.gateway.model import ServedModel
from services.gateway.openai_requests import read_chat, read_completion
from services.gateway.request import ValidRequest
from shared.errors import ServingError
from shared.keys import model_tag, new_request_id
from tessera.gateway.v1 import chat_pb2_grpc
from tessera.gateway.v1.chat_pb2 import (
    Accepted,
    ChatEvent,
    ChatMessage,
    ChatRequest,
    CompleteRequest,
    ContentPart,
    Delta,
    Finished,
    GenerationOptions,
    ListModelsRequest,
    ListModelsResponse,
    Model,
    Usage,
)

Context = grpc.aio.ServicerContext[Any, ChatEvent]


class ChatServicer(chat_pb2_grpc.ChatServiceServicer):
    """tessera.gateway.v1.ChatService."""

    def __init__(
        self, model: ServedModel, admission: Admission, metrics: Metrics, keys: ApiKeys
    ) -> None:
        self._model = model
        self._admission = admission
        self._metrics = metrics
        self._keys = keys
        self._tag = model_tag(model.name)

    async def Chat(self, request: ChatRequest, context: Context) -> AsyncIterator[ChatEvent]:
        """Answers a conversation."""
        content = _fields(request.model, request.options)
        content["messages"] = [_message(message) for message in request.messages]
        async for event in self._answer(content, context, chat=True):
            yield event

    async def Complete(
        self, request: CompleteRequest, context: Context
    ) -> AsyncIterator[ChatEvent]:
        """Continues a prompt."""
        content = _fields(request.model, request.options)
        kind = request.WhichOneof("prompt")
        if kind is not None:
            content["prompt"] = request.text if kind == "text" else list(request.token_ids.ids)
        async for event in self._answer(content, context, chat=False):
            yield event

    async def ListModels(self, request: ListModelsRequest, context: Any) -> ListModelsResponse:
        """The one model there is."""
        self._keys.caller("", *_metadata(context))
        model = Model(id=self._model.name, max_model_len=self._model.max_model_len)
        return ListModelsResponse(models=[model])

    async def _answer(
        self, content: Mapping[str, Any], context: Context, *, chat: bool
    ) -> AsyncIterator[ChatEvent]:
        caller = self._keys.caller(new_request_id(self._tag), *_metadata(context))
        request = self._read(content, chat=chat)
        answer = await self._admission.accept(request, caller)
        # gRPC may drop this generator between two events without a word to it.
        context.add_done_callback(lambda _: answer.close())  # type: ignore[arg-type]
        try:
            async for event in _events(answer):
                yield event
        finally:
            answer.close()

    def _read(self, content: Mapping[str, Any], *, chat: bool) -> ValidRequest:
        try:
            return (read_chat if chat else read_completion)(content, self._model)
        except ServingError as error:
            self._metrics.rejected(error.reason)
            raise


async def _events(answer: Answer) -> AsyncIterator[ChatEvent]:
    rid = answer.head.request_id
    with_ids = answer.head.reply.return_token_ids
    accepted = Accepted(
        request_id=rid,
        model=answer.head.model,
        prompt_tokens=answer.prompt_tokens,
        prompt_token_ids=answer.prompt_ids,
    )
    yield ChatEvent(event_id=f"{rid}/0", accepted=accepted)
    while True:
        piece = await answer.next()
        if piece is None:  # silence; keepalive pings hold the connection
            continue
        # Text that an ending sets free has no event id of its own: it goes out under that of the
        # ending.
        name = f"{rid}/{piece.count}" + ("" if piece.ending is None else "e")
        if piece.text or (with_ids and piece.token_ids):
            yield ChatEvent(event_id=name, delta=_delta(piece, with_ids))
        if piece.ending is not None:
            finished = Finished(reason=piece.ending.reason, stop=piece.ending.stop)
            yield ChatEvent(event_id=name, finished=finished)
            usage = Usage(
                prompt_tokens=answer.prompt_tokens,
                completion_tokens=piece.count,
                cached_tokens=piece.ending.cached_tokens,
            )
            answer.close()
            yield ChatEvent(event_id=name, usage=usage)
            return


def _delta(piece: Piece, with_ids: bool) -> Delta:
    return Delta(text=piece.text, token_ids=piece.token_ids if with_ids else None)


def _metadata(context: Any) -> tuple[str, str]:
    found = dict(context.invocation_metadata() or ())
    return str(found.get("authorization", "")), str(found.get("traceparent", ""))


def _fields(model: str, options: GenerationOptions) -> dict[str, Any]:
    """What is set, under the names of the REST door."""
    content: dict[str, Any] = {"model": model} if model else {}
    for field, value in options.ListFields():
        content[field.name] = list(value) if field.name in ("stop", "stop_token_ids") else value
    return content


def _message(message: ChatMessage) -> dict[str, Any]:
    return {"role": message.role, "content": [_part(part) for part in message.content]}


def _part(part: ContentPart) -> dict[str, Any]:
    match part.WhichOneof("part"):
        case "text":
            return {"type": "text", "text": part.text}
        case None:
            return {}
        case name:
            return {"type": "image_url", "image_url": getattr(part, name)}
