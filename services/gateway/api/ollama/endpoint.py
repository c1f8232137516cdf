"""Ollama's API."""

from collections.abc import Sequence

from services.gateway.admission.api_keys import BEARER
from services.gateway.admission.caller import Caller
from services.gateway.api.generating import Generating, Reader
from services.gateway.api.ollama.embeddings import Embeddings
from services.gateway.api.ollama.errors import error_reply
from services.gateway.api.ollama.message_replies import make_writer, whole
from services.gateway.api.ollama.models import Models
from services.gateway.api.ollama.replies import loaded
from services.gateway.api.ollama.requests import OnlyLoads, read_chat, read_generate
from services.gateway.api.ollama.schema import (
    ChatBody,
    EmbedBody,
    EmbeddingsBody,
    GenerateBody,
    ModelDescription,
    ModelEntries,
    ShowBody,
    Version,
)
from services.gateway.api.one_answer import written_by
from services.gateway.api.parts import Api, Parts
from services.gateway.http.endpoint import ReplyForm, Route
from services.gateway.http.exchange import Exchange
from services.gateway.http.forms import ErrorReply
from shared.environment import unix_time
from shared.errors import ServingError
from tessera.scheduler.v1.queue_pb2 import ReplyKind

_WRITE = written_by(make_writer, whole)


class OllamaEndpoint:
    """Chat, generate, vectors, and what is served."""

    roots = ("/api",)
    key_headers = (BEARER,)

    def __init__(self, answers: "Answers", embeddings: Embeddings, models: Models) -> None:
        self.routes: Sequence[Route] = (
            Route("POST", "/api/chat", answers.chat, ChatBody, generates=True),
            Route("POST", "/api/generate", answers.generate, GenerateBody, generates=True),
            Route("POST", "/api/embed", embeddings.embed, EmbedBody, generates=True),
            Route("POST", "/api/embeddings", embeddings.embeddings, EmbeddingsBody, generates=True),
            Route("GET", "/api/tags", models.tags, reply=ModelEntries),
            Route("GET", "/api/ps", models.ps, reply=ModelEntries),
            Route("POST", "/api/show", models.show, ShowBody, ModelDescription),
            Route("GET", "/api/version", models.version, reply=Version),
        )

    def error(self, error: ServingError) -> ErrorReply:
        """{"error": text}."""
        return error_reply(error)


class Answers:
    """The handlers that generate."""

    def __init__(self, generating: Generating) -> None:
        self._generating = generating
        self._chat = generating.reader(ChatBody, read_chat)
        self._generate = generating.reader(GenerateBody, read_generate)

    async def chat(self, exchange: Exchange, caller: Caller) -> None:
        """POST /api/chat: an answer to a conversation."""
        await self._answer(exchange, caller, self._chat, is_chat=True)

    async def generate(self, exchange: Exchange, caller: Caller) -> None:
        """POST /api/generate: an answer to a prompt."""
        await self._answer(exchange, caller, self._generate, is_chat=False)

    async def _answer(
        self, exchange: Exchange, caller: Caller, read: Reader, *, is_chat: bool
    ) -> None:
        try:
            await self._generating.answer(exchange, caller, read, _WRITE)
        except OnlyLoads:
            name = self._generating.model.name
            await exchange.respond(200, loaded(name, int(unix_time()), is_chat=is_chat))


def _endpoint(parts: Parts) -> OllamaEndpoint:
    return OllamaEndpoint(
        Answers(parts.generating),
        Embeddings(parts.pooling),
        Models(parts.model, parts.body_limits),
    )


OLLAMA = Api(
    _endpoint,
    {
        ReplyKind.REPLY_KIND_OLLAMA_CHAT: ReplyForm(make_writer),
        ReplyKind.REPLY_KIND_OLLAMA_GENERATE: ReplyForm(make_writer),
        ReplyKind.REPLY_KIND_OLLAMA_CHAT_MESSAGE: ReplyForm(make_writer),
        ReplyKind.REPLY_KIND_OLLAMA_GENERATE_MESSAGE: ReplyForm(make_writer),
    },
)
