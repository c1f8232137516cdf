"""What a request asks for beside its answer: how long it may take, how long it lives on without a
client, whether it may wait behind others, and under which key it is the same request again.

REST has them as headers and body fields, gRPC as metadata and options of the same names.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf.message import Message

from services.gateway.reading.data_urls import Luggage
from services.gateway.reading.fields import Fields
from shared.errors import InvalidRequest

# The name in lower case to its value, "" if absent.
Header = Callable[[str], str]

KEEP_S = 30
_LONGEST_KEEP_S = 600
_LONGEST_KEY = 255
_LONGEST_TIMEOUT_S = 86_400.0
# Larger strings (media) are hashed one by one: to write them down again costs more.
_LARGE = 4096

_BATCH_TIER = "flex"
_TIERS = ("auto", "default", "standard_only", "priority", "scale", _BATCH_TIER)
_CLASSES = ("interactive", "batch")
# They do not change the answer: who retries may read it in another way.
_NOT_HASHED = frozenset({"stream", "stream_options"})


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Milliseconds from arrival until the request is taken, its first token, its end; 0 is never."""

    queue_ms: int = 0
    first_token_ms: int = 0
    request_ms: int = 0

    @classmethod
    def of_seconds(cls, queue: float, first_token: float, request: float) -> "Timeouts":
        """The same in seconds."""
        return cls(round(queue * 1000), round(first_token * 1000), round(request * 1000))

    @property
    def waiting_ms(self) -> int:
        """After so long nobody need take it any more."""
        return min(filter(None, (self.queue_ms, self.first_token_ms, self.request_ms)), default=0)


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of one request."""

    idempotency_key: str = ""
    # Of the body, where there is a key.
    fingerprint: bytes = b""
    # The last event that the client has of the request with its key.
    last_event_id: str = ""
    # How long it lives on when its client has left; 0: it is cancelled at once.
    keep_ms: int = 0
    # Whether the events of a stream have ids: only who means to resume can read them.
    event_ids: bool = False
    prio: str = "interactive"
    timeouts: Timeouts = Timeouts()

    def of_part(self, index: int) -> "Terms":
        """Those of one of several prompts: a key of its own."""
        if not self.idempotency_key:
            return self
        return replace(self, idempotency_key=f"{self.idempotency_key}\0{index}")


NO_TERMS = Terms()


def read_terms(
    header: Header,
    content: Mapping[str, Any],
    limits: Timeouts,
    route: str = "",
    luggage: Luggage | None = None,
) -> Terms:
    """The terms in headers (or metadata) and body. `limits` are the server's own timeouts: a request
    may only shorten them. `route` keeps keys of unlike requests apart; `luggage` is what was taken
    out of the body.

    Raises InvalidRequest naming the header or field.
    """
    fields = Fields(content)
    key = _key(header)
    last = header("last-event-id")
    if last and not key:
        raise _wrong(
            "Last-Event-ID",
            "needs the Idempotency-Key of the request that it belongs to; or go on with "
            "GET /v1/requests/{id}/stream",
        )
    keep_ms = _keep_ms(header, bool(key))
    return Terms(
        idempotency_key=key,
        fingerprint=fingerprint(content, route, luggage or Luggage()) if key else b"",
        last_event_id=last,
        keep_ms=keep_ms,
        event_ids=_event_ids(header, bool(key or keep_ms)),
        prio=_prio(header, fields),
        timeouts=_timeouts(header, fields, limits),
    )


def fingerprint(content: Mapping[str, Any], route: str, luggage: Luggage) -> bytes:
    """16 bytes that are equal for bodies that ask for the same answer."""
    told = {name: value for name, value in content.items() if name not in _NOT_HASHED}
    text = json.dumps([route, _small(told, luggage)], sort_keys=True, separators=(",", ":"))
    return _digest(text.encode("utf-8", "surrogatepass"))


def _small(value: Any, luggage: Luggage) -> Any:
    """The same with large strings, and whatever JSON does not have, replaced by their digests."""
    if isinstance(value, Mapping):
        return {str(name): _small(inner, luggage) for name, inner in value.items()}
    if isinstance(value, list):
        is_plain = {*map(type, value)} <= {int, float}  # a prompt of ids may be long
        return value if is_plain else [_small(inner, luggage) for inner in value]
    if isinstance(value, str):
        head, _, data = value.partition(",")
        found = luggage.find(data)
        if found is not None:
            return [head, _digest(found).hex()]
        if len(data) > _LARGE:
            return [head, _digest(data.encode("utf-8", "surrogatepass")).hex()]
        return value
    if isinstance(value, Message):  # only from the gRPC door
        value = value.SerializeToString()
    return ["", _digest(value).hex()] if isinstance(value, bytes) else value


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _key(header: Header) -> str:
    key = header("idempotency-key").strip()
    if len(key) > _LONGEST_KEY:
        raise _wrong("Idempotency-Key", f"must not be longer than {_LONGEST_KEY} characters")
    return key


def _keep_ms(header: Header, has_key: bool) -> int:
    name = "X-Tessera-Resume"
    told = header(name.lower()).strip()
    if not told:
        return KEEP_S * 1000 if has_key else 0
    is_number = told.isascii() and told.isdigit() and len(told) <= 9
    if not is_number or int(told) > _LONGEST_KEEP_S:
        raise _wrong(
            name,
            f"must be a whole number of seconds from 0 to {_LONGEST_KEEP_S}, not {told[:24]!r}",
        )
    return int(told) * 1000


def _event_ids(header: Header, resumes: bool) -> bool:
    """Said outright, or by whatever else `resumes`."""
    name = "X-Tessera-Event-Ids"
    told = header(name.lower()).strip()
    if told not in ("", "0", "1"):
        raise _wrong(name, f"must be 1 or 0, not {told[:24]!r}")
    return told == "1" or (resumes and not told)


def _prio(header: Header, fields: Fields) -> str:
    name = "X-Tessera-Priority"
    told = header(name.lower()).strip().lower()
    if told and told not in _CLASSES:
        raise _wrong(name, f"must be {' or '.join(_CLASSES)}, not {told[:24]!r}")
    tier = fields.string("service_tier", "auto") or "auto"
    if tier not in _TIERS:
        raise fields.wrong("service_tier", f"must be one of {', '.join(_TIERS)}, not {tier[:24]!r}")
    return told or _CLASSES[tier == _BATCH_TIER]


def _timeouts(header: Header, fields: Fields, limits: Timeouts) -> Timeouts:
    wanted = _seconds(header, "X-Tessera-Request-Timeout")
    if "timeout" in fields:
        timeout = fields.number("timeout", 0.0, 0.0, _LONGEST_TIMEOUT_S)
        if timeout == 0:
            raise fields.wrong("timeout", "must be greater than 0: leave it out for none")
        wanted = timeout
    return Timeouts(
        queue_ms=_shorter(_seconds(header, "X-Tessera-Queue-Timeout"), limits.queue_ms),
        first_token_ms=_shorter(
            _seconds(header, "X-Tessera-First-Token-Timeout"), limits.first_token_ms
        ),
        request_ms=_shorter(wanted, limits.request_ms),
    )


def _seconds(header: Header, name: str) -> float:
    text = header(name.lower()).strip()
    if not text:
        return 0.0
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= _LONGEST_TIMEOUT_S:  # also not a number
        raise _wrong(
            name,
            f"must be a number of seconds above 0, to {_LONGEST_TIMEOUT_S:g}, not {text[:24]!r}",
        )
    return value


def _shorter(seconds: float, limit_ms: int) -> int:
    """The shorter of what is asked for and what the server allows; 0 is none of both."""
    wanted = max(1, round(seconds * 1000)) if seconds else 0
    return min(filter(None, (wanted, limit_ms)), default=0)


def _wrong(name: str, message: str) -> InvalidRequest:
    return InvalidRequest("INVALID_HEADER", f"{name} {message}", field=name)
