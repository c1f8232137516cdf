"""The routes of the Responses API."""

from collections.abc import Sequence

from services.gateway.admission.api_keys import BEARER
from services.gateway.admission.caller import Caller
from services.gateway.api.generating import Generating
from services.gateway.api.parts import Api, Parts
from services.gateway.api.responses.compaction import Compaction
from services.gateway.api.responses.creation import Creation
from services.gateway.api.responses.errors import error_reply
from services.gateway.api.responses.events import ResponseWriter
from services.gateway.api.responses.handlers import Responses
from services.gateway.api.responses.input_tokens import CountInput
from services.gateway.api.responses.kept import KeptResponses
from services.gateway.api.responses.response import ID_PREFIX
from services.gateway.api.responses.schema import CompactBody, InputTokens, ResponseBody
from services.gateway.http.endpoint import ReplyForm, Route
from services.gateway.http.exchange import Exchange
from services.gateway.http.forms import ErrorReply
from shared.errors import ServingError
from tessera.scheduler.v1.queue_pb2 import ReplyKind

_USER = {"user": "the `user` of the request, where the server has no keys"}
_EVENTS = {
    "stream": "true: its events",
    "starting_after": "a `sequence_number`: the events behind it",
}
_PAGE = {
    "limit": "so many items, up to 100",
    "order": "asc or desc",
    "after": "the id of an item: those behind it",
}


class ResponsesEndpoint:
    """/v1/responses, and what lies below it."""

    roots = ("/v1/responses",)
    key_headers = (BEARER,)

    def __init__(
        self,
        generating: Generating,
        kept: KeptResponses,
        responses: Responses,
        counting: CountInput,
    ) -> None:
        self._generating = generating
        self._kept = kept
        path = "/v1/responses"
        self.routes: Sequence[Route] = (
            Route("POST", path, self._create, ResponseBody, generates=True),
            Route("POST", f"{path}/input_tokens", counting.count, ResponseBody, InputTokens),
            Route("POST", f"{path}/compact", self._compact, CompactBody, generates=True),
            Route("GET", f"{path}/*", responses.get, query={**_EVENTS, **_USER}),
            Route("DELETE", f"{path}/*", responses.delete, query=_USER),
            Route("POST", f"{path}/*/cancel", responses.cancel, query=_USER),
            Route("GET", f"{path}/*/input_items", responses.input_items, query={**_PAGE, **_USER}),
        )

    def error(self, error: ServingError) -> ErrorReply:
        """{"error": {"message", "type", "param", "code"}}."""
        return error_reply(error)

    async def _create(self, exchange: Exchange, caller: Caller) -> None:
        one = Creation(self._generating, self._kept, caller)
        await self._generating.answer(exchange, caller, one.read, one.write, look_up=one.look_up)

    async def _compact(self, exchange: Exchange, caller: Caller) -> None:
        """POST /v1/responses/compact: makes a summary of a conversation, which takes its place."""
        one = Compaction(self._generating, self._kept, caller)
        await self._generating.answer(exchange, caller, one.read, one.write, look_up=one.look_up)


def _endpoint(parts: Parts) -> ResponsesEndpoint:
    kept = KeptResponses(
        parts.responses,
        parts.resumption,
        parts.work,
        parts.timings.sweep_s,
        parts.body_limits.most_bytes,
    )
    counting = CountInput(parts.generating, kept, parts.pool, parts.sent_files, parts.body_limits)
    return ResponsesEndpoint(parts.generating, kept, Responses(kept, parts.resumption), counting)


RESPONSES = Api(_endpoint, {ReplyKind.REPLY_KIND_RESPONSE: ReplyForm(ResponseWriter, ID_PREFIX)})
