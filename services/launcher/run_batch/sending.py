"""Requests to a server, sent again while it is full or away."""

import asyncio
import ssl
from dataclasses import dataclass
from typing import Self

import httpx

from shared.environment import monotonic
from shared.net.backoff import Backoff

_PAUSES = Backoff(first_s=0.5, longest_s=15.0)
_CONNECT_S = 10.0
# So long the server may be away before a run gives up.
_PATIENCE_S = 120.0
_LATER = frozenset({429, 502, 503})


class ServerAway(Exception):
    """Nobody answers; the message is for users."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole reply."""

    status: int
    request_id: str
    body: bytes


class Sender:
    """A client of one server. `async with` opens its connections."""

    def __init__(
        self,
        base_url: str,
        key: str,
        at_once: int,
        tls: ssl.SSLContext | None,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        """`base_url` may end with /v1, which lines have too."""
        self._root = base_url.rstrip("/").removesuffix("/v1")
        self._patience_s = patience_s
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.AsyncClient(
            headers=headers,
            verify=tls or True,
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=at_once, max_keepalive_connections=at_once),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def post(self, path: str, body: bytes, idempotency_key: str) -> Reply:
        """Sends it until there is an answer. Raises ServerAway."""
        headers = {
            "content-type": "application/json",
            "idempotency-key": idempotency_key,
            "x-tessera-priority": "batch",
        }
        failures, away_since = 0, 0.0
        while True:
            try:
                reply = await self._http.post(self._root + path, content=body, headers=headers)
            except httpx.TransportError as error:
                away_since = away_since or monotonic()
                if monotonic() - away_since > self._patience_s:
                    why = f"{type(error).__name__}: {error}"
                    raise ServerAway(f"nobody answers at {self._root} ({why})") from error
                wanted_s = 0.0
            else:
                away_since = 0.0
                if reply.status_code not in _LATER:
                    name = reply.headers.get("x-request-id", "")
                    return Reply(reply.status_code, name, reply.content)
                wanted_s = _seconds(reply.headers.get("retry-after", ""))
            failures += 1
            await asyncio.sleep(max(wanted_s, _PAUSES.pause_s(failures)))


def _seconds(given: str) -> float:
    return min(60.0, float(given)) if given.isascii() and given.isdigit() else 0.0
