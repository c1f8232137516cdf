"""The description of this server's routes: for machines in OpenAPI's form, for people as a page."""

from collections.abc import Sequence
from pathlib import Path

from services.gateway.admission.api_keys import BEARER
from services.gateway.admission.caller import Caller
from services.gateway.api.compact_json import compact
from services.gateway.api.error_object import error_reply
from services.gateway.api.tessera.description.document import describe
from services.gateway.api.tessera.page import Page
from services.gateway.decoding.decode import in_thread
from services.gateway.http.endpoint import Endpoint, Route
from services.gateway.http.exchange import Exchange
from services.gateway.http.forms import ErrorReply
from services.gateway.release import release
from shared.errors import ServingError

_PAGE = Path(__file__).with_name("page.html")


class DescriptionEndpoint:
    """GET /openapi.json and /docs."""

    roots = ("/openapi.json", "/docs")
    key_headers = (BEARER,)

    def __init__(self, endpoints: Sequence[Endpoint], *, has_keys: bool) -> None:
        """`endpoints`: all others; `has_keys`: whether callers need keys."""
        # Who may call the server may know what there is to call.
        self.routes: Sequence[Route] = (
            Route("GET", "/openapi.json", self._openapi, needs_key=False),
            Route("GET", "/docs", self._docs, needs_key=False),
        )
        self._described = [*endpoints, self]
        self._has_keys = has_keys
        self._document = b""
        self._page = Page(_PAGE)

    def error(self, error: ServingError) -> ErrorReply:
        """In OpenAI's form."""
        return error_reply(error)

    async def _openapi(self, exchange: Exchange, caller: Caller) -> None:
        """GET /openapi.json: all routes and their fields, in OpenAPI's form."""
        if not self._document:
            self._document = await in_thread(self._make)
        await exchange.respond(200, self._document)

    async def _docs(self, exchange: Exchange, caller: Caller) -> None:
        """GET /docs: a page that shows them, and sends requests."""
        await self._page.send(exchange)

    def _make(self) -> bytes:
        document = describe(self._described, release(), has_keys=self._has_keys)
        return compact(document).encode()
