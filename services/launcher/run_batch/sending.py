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
# Statuses that the same request need not get later: a full queue, a service that is away.
_LATER = frozenset({429, 502, 503})
# The answer was lost, or took too long: it may go well next time, and is not tried for ever.
_LOST = frozenset({500, 504})
_LOST_CODES = frozenset({"model_changed", "stream_diverged"})
_MOST_LOST = 5
# It was not begun within a time that is meant for those who wait for an answer.
_NOT_BEGUN = "queue_timeout"
# The time that the request itself, or the server for all requests, has set for the whole of it.
_TOO_LONG = "request_timeout"


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
        pauses: Backoff = _PAUSES,
    ) -> None:
        """`base_url` may end with /v1, which lines have too."""
        self._root = base_url.rstrip("/").removesuffix("/v1")
        self._pauses = pauses
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
        failures, losses, away_since = 0, 0, 0.0
        while True:
            try:
                reply = await self._http.post(self._root + path, content=body, headers=headers)
            except httpx.TransportError as error:
                away_since = away_since or monotonic()
                if monotonic() - away_since > _PATIENCE_S:
                    why = f"{type(error).__name__}: {error}"
                    raise ServerAway(f"nobody answers at {self._root} ({why})") from error
                wanted_s = 0.0
            else:
                away_since = 0.0
                losses += _is_lost(reply)
                if not _may_come(reply, losses):
                    name = reply.headers.get("x-request-id", "")
                    return Reply(reply.status_code, name, reply.content)
                wanted_s = _seconds(reply.headers.get("retry-after", ""))
            failures += 1
            await asyncio.sleep(max(wanted_s, self._pauses.pause_s(failures)))


def _may_come(reply: httpx.Response, losses: int) -> bool:
    """Whether there may be another reply to the same request; `losses`: how often its answer was lost."""
    if reply.status_code in _LATER or _code(reply) == _NOT_BEGUN:
        return True
    return _is_lost(reply) and losses <= _MOST_LOST


def _is_lost(reply: httpx.Response) -> bool:
    code = _code(reply)
    return code in _LOST_CODES or (
        reply.status_code in _LOST and code not in (_NOT_BEGUN, _TOO_LONG)
    )


def _code(reply: httpx.Response) -> str:
    """What an error in OpenAI's form calls itself; empty for other replies."""
    if reply.is_success:
        return ""
    try:
        code = reply.json()["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return ""
    return code if isinstance(code, str) else ""


def _seconds(given: str) -> float:
    return min(60.0, float(given)) if given.isascii() and given.isdigit() else 0.0
