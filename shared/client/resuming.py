"""Streams that continue on another connection: at another gateway, or at the same one restarted, with the next token.

Every request carries an `Idempotency-Key`, so that a repetition before the first event joins the request instead of
making a second one, and `X-Tessera-Resume`, so that it is not cancelled when the connection breaks. After an event the
stream continues after it: `GET /v1/requests/{id}/stream?after={event id}`.
"""

import asyncio
import contextlib
import json
import secrets
import ssl
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from shared.client.errors import Failed, GaveUp, Refused
from shared.client.events import Event, EventParser
from shared.client.http import HttpClient, HttpError, HttpRefusal
from shared.net.backoff import Backoff

_BACKOFF = Backoff(first_s=0.1, longest_s=1.0)
_SILENCE_S = 25.0  # a gateway sends something every ten seconds
_UNTIL_FIRST_BYTE_S = 120.0  # media are fetched and prepared before anything is sent
_UNKNOWN_S = 5.0  # a restarted queue is told by its gateways which requests it has lost
_LEAVE_WITHIN_S = 2.0
_KEEP_WHOLE_S = 30.0
_CONNECTED_S = 1.0  # an attempt that fails later had been connected
_SHUTTING_DOWN = "shutting_down"  # code of the last event of a gateway that ends
_BUSY = (429, 503)
_BAD_GATEWAY = 502  # a proxy's answer where the gateway cannot be reached
_NOT_FOUND = 404


class Client:
    """A client of several gateways of one system. One event loop; any number of streams."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        api_key: str = "",
        patience_s: float = 60.0,
        tries: int = 0,
        tls: ssl.SSLContext | None = None,
        unknown_s: float = _UNKNOWN_S,
    ) -> None:
        """`urls` are base URLs of gateways, with or without /v1; the first is preferred.

        A stream gives up after `patience_s` seconds (1 to 600) without an event or a reason to wait; the server keeps
        its request as long. `tries` bounds the attempts in a row; 0 does not. `tls` is for https, that of
        the system unless given. `unknown_s`: how long a request that has begun may be unknown to the gateways. Raises
        ValueError for bad URLs.
        """
        if not urls:
            raise ValueError("a client needs the address of a gateway")
        self._servers = [HttpClient(url, api_key, tls) for url in urls]
        self.patience_s = patience_s
        self.tries = tries
        self.unknown_s = unknown_s
        self._preferred = 0
        self.reconnects = 0  # attempts after the first one, over all streams

    async def get(self, path: str) -> Any:
        """A JSON document of the first gateway that answers. Raises ClientError."""
        failure = ""
        for server in self._servers:
            try:
                return json.loads(await server.get(path))
            except HttpRefusal as error:
                raise Refused(error.status, error.reason) from None
            except (HttpError, ValueError) as error:
                failure = str(error)
        raise GaveUp(failure)

    async def post(self, path: str, body: Mapping[str, Any]) -> bytes:
        """The reply to what may be sent twice, and is, while no gateway can answer. Raises ClientError."""
        content = json.dumps(body).encode()
        until, failures = time.monotonic() + self.patience_s, 0
        while True:
            server = self.server()
            pieces: list[bytes] = []
            try:
                await server.request("POST", path, content, pieces.append)
                return b"".join(pieces)
            except HttpRefusal as error:
                if error.status not in (*_BUSY, _BAD_GATEWAY):
                    raise Refused(error.status, error.reason) from None
                failure = str(error)
            except HttpError as error:
                failure = str(error)
            if time.monotonic() > until:
                raise GaveUp(failure)
            self.avoid(server)
            failures += 1
            await asyncio.sleep(_BACKOFF.pause_s(failures))

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Event, None]:
        """The events of a streamed completion, each once, over as many connections as it takes.

        `path` is such as "/v1/chat/completions"; `stream` is set in the body. Closing the generator before its end
        cancels the request. Raises ClientError.
        """
        answer = _Answer(self, path, body)
        try:
            async for event in answer.events():
                yield event
        finally:
            await answer.leave()

    async def whole(self, path: str, body: Mapping[str, Any]) -> Any:
        """The reply to a completion that is not streamed, asked for again wherever a connection breaks: the request is
        one all the same. Raises ClientError.
        """
        return await _Answer(self, path, body, stream=False).whole()

    def close(self) -> None:
        """Closes the idle connections."""
        for server in self._servers:
            server.close()

    def server(self) -> HttpClient:
        """The gateway that answered last."""
        return self._servers[self._preferred]

    def avoid(self, server: HttpClient) -> None:
        """Prefers the next gateway from now on, unless another stream has changed it already."""
        if self.server() is server:
            self._preferred = (self._preferred + 1) % len(self._servers)

    def __len__(self) -> int:
        return len(self._servers)


class _Answer:
    """One request, and how far its stream has been read."""

    def __init__(
        self, client: Client, path: str, body: Mapping[str, Any], *, stream: bool = True
    ) -> None:
        self._client = client
        self._path = path
        self._body = json.dumps({**body, "stream": stream}).encode()
        # A reply that is not streamed cannot be left by a DELETE: its request has no name yet.
        self._keep_s = client.patience_s if stream else min(client.patience_s, _KEEP_WHOLE_S)
        # Without API keys `user` identifies the owner of the request, also in later calls.
        self._user = str(body.get("user") or "")
        self._key = secrets.token_urlsafe(16)
        self._last_id = ""
        self._is_over = False
        self._has_usage = False
        self._has_begun = False
        self._is_one = True  # each of several prompts in a body is a request
        self._failures = 0  # in a row
        self._heard_at = time.monotonic()

    async def events(self) -> AsyncGenerator[Event, None]:
        """Until [DONE]."""
        while True:
            server = self._client.server()
            try:
                async for event in self._attempt(server):
                    self._note(event)
                    if not self._is_repeated_usage(event):
                        yield event
                if self._is_over:
                    return
                raise HttpError("the stream broke off")
            except HttpError as error:
                pause = self._pause_after(error)
                self._client.avoid(server)
            await asyncio.sleep(pause)
            self._client.reconnects += 1

    async def whole(self) -> Any:
        """The reply that is not streamed. Nothing is heard of it until it is there."""
        while True:
            server, began = self._client.server(), time.monotonic()
            pieces: list[bytes] = []
            method, path, body, headers = self._request()
            try:
                await server.request(method, path, body, pieces.append, headers)
                return json.loads(b"".join(pieces))
            except HttpError as error:
                if time.monotonic() - began > _CONNECTED_S:
                    self._heard_at = time.monotonic()
                pause = self._pause_after(error)
                self._client.avoid(server)
            await asyncio.sleep(pause)
            self._client.reconnects += 1

    async def leave(self) -> None:
        """Cancels the request if it has not ended."""
        if self._is_over or not self._last_id:
            return
        self._is_over = True
        with contextlib.suppress(HttpError, TimeoutError):
            async with asyncio.timeout(_LEAVE_WITHIN_S):
                path = f"/v1/requests/{self._request_id}{self._query()}"
                await self._client.server().request("DELETE", path, b"", bytes)

    @property
    def _request_id(self) -> str:
        return self._last_id.partition("/")[0]

    async def _attempt(self, server: HttpClient) -> AsyncGenerator[Event, None]:
        """The events of one connection. Raises HttpError, also when nothing is received for too long."""
        inbox: asyncio.Queue[list[Event] | None] = asyncio.Queue()
        parser = EventParser()
        method, path, body, headers = self._request()
        exchange = asyncio.create_task(
            server.request(
                method, path, body, lambda piece: inbox.put_nowait(parser.feed(piece)), headers
            )
        )
        exchange.add_done_callback(lambda _: inbox.put_nowait(None))
        patience = _SILENCE_S if self._last_id else _UNTIL_FIRST_BYTE_S
        try:
            while (events := await _within(patience, inbox.get())) is not None:
                patience = _SILENCE_S
                self._heard_at = time.monotonic()
                for event in events:
                    yield event
            self._is_over = parser.is_done
            if not self._is_over:
                await exchange  # raises its error
        finally:
            exchange.cancel()
            await asyncio.gather(exchange, return_exceptions=True)

    def _query(self, **fields: str) -> str:
        query = urlencode({**fields, **({"user": self._user} if self._user else {})})
        return f"?{query}" if query else ""

    def _request(self) -> tuple[str, str, bytes, str]:
        """Method, path, body and headers of the next attempt."""
        keep = f"X-Tessera-Resume: {max(1, round(self._keep_s))}\r\n"
        if not self._last_id:
            return "POST", self._path, self._body, f"{keep}Idempotency-Key: {self._key}\r\n"
        path = f"/v1/requests/{self._request_id}/stream{self._query(after=self._last_id)}"
        return "GET", path, b"", f"{keep}Last-Event-ID: {self._last_id}\r\n"

    def _note(self, event: Event) -> None:
        """Raises Failed for an event that is an error, HttpError if only the gateway ends and the answer continues."""
        error = event.data.get("error")
        if error:
            content = error if isinstance(error, dict) else {"message": error}
            if content.get("code") == _SHUTTING_DOWN:
                raise HttpError("the gateway is shutting down")
            self._is_over = True
            raise Failed(str(content.get("message", content)), str(content.get("code") or ""))
        self._failures = 0
        self._has_begun = True
        if event.id:
            self._is_one &= not self._last_id or event.id.startswith(f"{self._request_id}/")
            self._last_id = event.id

    def _is_repeated_usage(self, event: Event) -> bool:
        """The event of usage comes again with each resume behind the end of all choices."""
        if event.data.get("choices") or not event.data.get("usage"):
            return False
        repeated, self._has_usage = self._has_usage, True
        return repeated

    def _pause_after(self, error: HttpError) -> float:
        """Seconds to the next attempt. Raises ClientError if none can help."""
        self._failures += 1
        waited = time.monotonic() - self._heard_at
        pause = self._backoff()
        if isinstance(error, HttpRefusal):
            if error.status in _BUSY:
                pause = max(pause, error.retry_after_s)
            elif not self._may_pass(error.status, waited):
                raise Refused(error.status, error.reason) from None
        if self._has_begun and not self._last_id:
            raise GaveUp(f"{error}, and this server's events have no ids to go on behind") from None
        if not self._is_one:
            raise GaveUp(f"{error}, and a body of several prompts cannot be gone on with") from None
        out_of_tries = self._failures == self._client.tries
        if out_of_tries or waited + pause > self._client.patience_s:
            if isinstance(error, HttpRefusal):
                raise Refused(error.status, error.reason) from None
            raise GaveUp(f"{error} (tried {self._failures} times in {waited:.0f} s)") from None
        return pause

    def _may_pass(self, status: int, waited: float) -> bool:
        if status == _NOT_FOUND:
            return bool(self._last_id) and waited < self._client.unknown_s
        return status == _BAD_GATEWAY

    def _backoff(self) -> float:
        """Another gateway is asked at once; when all have been asked, after a pause that grows."""
        rounds, others = divmod(self._failures, len(self._client))
        if others:
            return 0.0
        return _BACKOFF.pause_s(rounds)


async def _within(seconds: float, item: Any) -> Any:
    """Awaits; a wait that is too long is a broken connection."""
    try:
        async with asyncio.timeout(seconds):
            return await item
    except TimeoutError:
        raise HttpError(f"the gateway said nothing for {seconds:.0f} s") from None
