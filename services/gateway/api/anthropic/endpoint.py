"""Anthropic's routes."""

from collections.abc import Sequence

from services.gateway.admission.api_keys import BEARER, X_API_KEY
from services.gateway.admission.caller import Caller
from services.gateway.api.anthropic.batches.batch_objects import PATH as BATCHES
from services.gateway.api.anthropic.batches.creation import BatchCreation
from services.gateway.api.anthropic.batches.handlers import MessageBatches
from services.gateway.api.anthropic.batches.line_form import MessageLines
from services.gateway.api.anthropic.batches.schema import (
    DeletedMessageBatch,
    MessageBatch,
    MessageBatchBody,
    MessageBatchPage,
)
from services.gateway.api.anthropic.count_tokens import CountTokens
from services.gateway.api.anthropic.errors import error_reply
from services.gateway.api.anthropic.replies import ID_PREFIX, MessageWriter, whole
from services.gateway.api.anthropic.requests import read_message
from services.gateway.api.anthropic.schema import CountBody, MessagesBody, TokenCount
from services.gateway.api.anthropic.version import check_version
from services.gateway.api.generating import Generating
from services.gateway.api.one_answer import written_by
from services.gateway.api.parts import Api, Parts
from services.gateway.http.endpoint import ReplyForm, Route
from services.gateway.http.exchange import Exchange
from services.gateway.http.forms import ErrorReply
from shared.errors import ServingError
from shared.queue.stores.batch_store import MESSAGE_KIND
from tessera.scheduler.v1.queue_pb2 import ReplyKind

_PAGE = {
    "limit": "how many to list at most",
    "after_id": "the id behind which the list goes on",
    "before_id": "the id before which a page ends",
}
_WRITE = written_by(MessageWriter, whole)


class AnthropicEndpoint:
    """/v1/messages, /v1/messages/count_tokens and /v1/messages/batches."""

    roots = ("/v1/messages",)
    key_headers = (X_API_KEY, BEARER)

    def __init__(
        self, generating: Generating, counting: CountTokens, batches: MessageBatches
    ) -> None:
        self._generating = generating
        self._read = generating.reader(MessagesBody, read_message)
        path = "/v1/messages"
        self.routes: Sequence[Route] = (
            Route("POST", path, self._answer, MessagesBody, generates=True),
            Route("POST", f"{path}/count_tokens", counting.count, CountBody, TokenCount),
            Route("POST", BATCHES, batches.create, MessageBatchBody, MessageBatch),
            Route("GET", BATCHES, batches.all, reply=MessageBatchPage, query=_PAGE),
            Route("GET", f"{BATCHES}/*", batches.one, reply=MessageBatch),
            Route("DELETE", f"{BATCHES}/*", batches.delete, reply=DeletedMessageBatch),
            Route("POST", f"{BATCHES}/*/cancel", batches.cancel, reply=MessageBatch),
            Route("GET", f"{BATCHES}/*/results", batches.results),
        )

    def error(self, error: ServingError) -> ErrorReply:
        """{"type": "error", "error": {"type", "message"}}."""
        return error_reply(error)

    async def _answer(self, exchange: Exchange, caller: Caller) -> None:
        check_version(exchange)
        await self._generating.answer(exchange, caller, self._read, _WRITE)


def _endpoint(parts: Parts) -> AnthropicEndpoint:
    keep_ms = parts.file_limits.keep_ms
    creation = BatchCreation(parts.batches, parts.files, parts.work, parts.slices, keep_ms)
    limits, forms = parts.body_limits, parts.batch_forms
    forms.add(MESSAGE_KIND, MessageLines())
    return AnthropicEndpoint(
        parts.generating,
        CountTokens(parts.model, parts.pool, parts.sent_files, limits),
        MessageBatches(creation, parts.batches, parts.files, forms, limits),
    )


ANTHROPIC = Api(_endpoint, {ReplyKind.REPLY_KIND_ANTHROPIC: ReplyForm(MessageWriter, ID_PREFIX)})
