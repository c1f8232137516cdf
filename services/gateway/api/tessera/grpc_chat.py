"""The public gRPC API."""

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc
from google.protobuf.message import Message

from services.gateway.admission.caller import tenant_of
from services.gateway.admission.resume import Resumption
from services.gateway.api.grpc_methods.generating import GrpcGenerating, Read, closing
from services.gateway.api.tessera.grpc_events import events
from services.gateway.api.tessera.grpc_requests import (
    read_chat,
    read_chat_options,
    read_complete,
    read_options,
)
from services.gateway.api.tessera.request_status import status_message
from services.gateway.following.answer import Answer
from services.gateway.model.served_model import ServedModel
from services.gateway.telemetry.served_parts import ServedParts
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

Context = grpc.aio.ServicerContext[Any, ChatEvent]


class ChatServicer(chat_pb2_grpc.ChatServiceServicer):
    """tessera.gateway.v1.ChatService."""

    def __init__(
        self,
        model: ServedModel,
        parts: ServedParts,
        resumption: Resumption,
        generating: GrpcGenerating,
    ) -> None:
        self._model = model
        self._parts = parts
        self._resumption = resumption
        self._generating = generating

    async def Chat(self, request: ChatRequest, context: Context) -> AsyncIterator[ChatEvent]:
        """Answers a conversation."""

        def read() -> Read:
            options = read_chat_options(request)
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
        """The one model there is, and its adapters."""
        self._generating.caller(context)
        parts = {name: _part(said) for name, said in (await self._parts.now()).items()}
        longest = self._model.max_model_len
        tasks = [task.value for task in self._model.tasks]
        models = [
            Model(id=name, max_model_len=longest, parts=parts, tasks=tasks)
            for name in self._model.names
        ]
        return ListModelsResponse(models=models)

    async def _answer(
        self, message: Message, read: Callable[[], Read], method: str, context: Context
    ) -> AsyncIterator[ChatEvent]:
        """Admits what `read` makes of the message, and streams its events."""
        answer = await self._generating.accept(message, read, method, context)
        async for event in _events(answer, context):
            yield event

    def _tenant(self, user: str, context: Any) -> str:
        return tenant_of(self._generating.caller(context), user)


def _part(said: Mapping[str, Any]) -> ModelPart:
    return ModelPart(
        code=said["code"],
        off=said["off"],
        largest_difference=said.get("largest_difference"),
        ranks=said.get("ranks"),
    )


async def _events(answer: Answer, context: Context) -> AsyncIterator[ChatEvent]:
    with closing(answer, context):
        async for event in events(answer):
            yield event
