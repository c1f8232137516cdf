"""Calls that a gateway makes of its own routes: by the same handlers, without a connection."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from services.gateway.admission.caller import Caller
from services.gateway.http.app import App
from services.gateway.http.exchange import Exchange, Message
from shared.environment import monotonic
from shared.errors import Internal, InvalidRequest
from shared.queue.keys import new_request_id

# Bytes of a reply. Larger ones would keep the event loop, and Redis, from others.
_LARGEST = 16 << 20

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class InnerReply:
    """What came of a call."""

    status: int
    body: bytes
    request_id: str
    # Why it failed (`ServingError.reason`); empty for an answer.
    reason: str = ""


class InnerCall:
    """One POST of a JSON body, for a tenant."""

    def __init__(
        self, app: App, tag: str, path: str, headers: Headers, body: bytes, tenant: str
    ) -> None:
        self._app = app
        self._body: bytes | None = body
        self._tenant = tenant
        self._status = 0
        self._pieces: list[bytes] = []
        self._size = 0
        self._is_whole = False
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "headers": [(b"content-type", b"application/json"), *headers],
        }
        name = new_request_id(tag)
        self._exchange = Exchange(scope, self._receive, self._send, name, app.form)

    @property
    def accepted(self) -> str:
        """The id of its request, once that has been accepted; empty until then."""
        return self._exchange.request_id if self._exchange.accepted else ""

    async def answer(self) -> InnerReply:
        """The whole reply, also where that is an error. Raises InvalidRequest for one that is too large, Internal where
        it breaks off.
        """
        exchange = self._exchange
        caller = Caller(exchange.request_id, arrived_at=monotonic(), tenant=self._tenant)
        await self._app.call(exchange, caller)
        if self._size > _LARGEST:
            raise InvalidRequest(
                "ANSWER_TOO_LARGE",
                f"the answer has {self._size} bytes, more than {_LARGEST}: ask for fewer choices or log-probabilities",
            )
        if not self._is_whole:
            raise Internal("REPLY_BROKE_OFF", f"the reply of {exchange.path} broke off")
        body = b"".join(self._pieces)
        return InnerReply(self._status, body, exchange.request_id, exchange.reason)

    async def _receive(self) -> Message:
        body, self._body = self._body, None
        if body is None:  # nobody leaves
            await asyncio.get_running_loop().create_future()
        return {"type": "http.request", "body": body, "more_body": False}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            return
        self._size += len(message["body"])
        if self._size > _LARGEST:
            self._pieces.clear()
        else:
            self._pieces.append(message["body"])
        self._is_whole = not message.get("more_body")


class InnerCalls:
    """Makes calls, once there is the application that answers them."""

    def __init__(self, tag: str) -> None:
        """`tag` is the model's, in the ids of requests."""
        self._tag = tag
        self._app: App | None = None

    def open(self, app: App) -> None:
        """From now on `app` answers."""
        self._app = app

    @property
    def paths(self) -> Sequence[str]:
        """Those below /v1 whose POST asks for one answer."""
        return self._opened.generating

    def post(self, path: str, headers: Headers, body: bytes, tenant: str) -> InnerCall:
        """A call, which has not been made yet."""
        return InnerCall(self._opened, self._tag, path, headers, body, tenant)

    @property
    def _opened(self) -> App:
        assert self._app is not None, "it is not open yet"
        return self._app
