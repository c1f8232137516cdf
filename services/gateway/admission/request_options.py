"""Options of a request that do not shape its answer: timeouts, how long it lives on without a client,
its class in the queue, and its idempotency key.

REST has them as headers and body fields, gRPC as metadata and options of the same names.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from services.gateway.admission.caller import Header
from services.gateway.decoding.bounds import number, wrong
from services.gateway.decoding.decode import load_in_turns
from services.gateway.reading.media.data_urls import InlineMedia
from services.gateway.reading.options import GenerationOptions
from shared.errors import InvalidRequest

KEEP_S = 30
_LONGEST_KEEP_S = 600
_LONGEST_KEY = 255
_LONGEST_TIMEOUT_S = 86_400.0
# Larger strings (media) are hashed one by one: to write them down again costs more.
_LARGE = 4096

_BATCH_TIER = "flex"
_TIERS = ("auto", "default", "standard_only", "priority", "scale", _BATCH_TIER)
_CLASSES = ("interactive", "batch")
# They do not change the answer: a retry may read it in another way.
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
        """Milliseconds after which it need not be taken any more; 0 is never."""
        return min(filter(None, (self.queue_ms, self.first_token_ms, self.request_ms)), default=0)


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The options of one request."""

    idempotency_key: str = ""
    # Of the body, where there is a key.
    fingerprint: bytes = b""
    # The last event that the client has of the request with its key.
    last_event_id: str = ""
    # How long it lives on when its client has left; 0: it is cancelled at once.
    keep_ms: int = 0
    # Whether the events of a stream have ids. Some readers fail on them, so only clients that resume get them.
    event_ids: bool = False
    prio: str = "interactive"
    timeouts: Timeouts = Timeouts()

    def of_part(self, index: int) -> "RequestOptions":
        """Those of one of several prompts: a key of its own."""
        if not self.idempotency_key:
            return self
        return replace(self, idempotency_key=f"{self.idempotency_key}\0{index}")


NO_OPTIONS = RequestOptions()


def read_request_options(
    header: Header,
    options: GenerationOptions,
    limits: Timeouts,
    fingerprint: Callable[[], bytes] = bytes,
) -> RequestOptions:
    """The options in headers (or metadata) and body. `limits` are the server's own timeouts: a
    request may only shorten them. `fingerprint` digests the body, where there is a key.

    Raises InvalidRequest naming the header or field.
    """
    key = _key(header)
    last = header("last-event-id")
    if last and not key:
        raise _wrong(
            "Last-Event-ID",
            "needs the Idempotency-Key of the request that it belongs to; or go on with "
            "GET /v1/requests/{id}/stream",
        )
    keep_ms = _keep_ms(header, bool(key))
    return RequestOptions(
        idempotency_key=key,
        fingerprint=fingerprint() if key else b"",
        last_event_id=last,
        keep_ms=keep_ms,
        event_ids=_event_ids(header, bool(key or keep_ms)),
        prio=_prio(header, options),
        timeouts=_timeouts(header, options, limits),
    )


def json_fingerprint(body: bytes, route: str, media: InlineMedia) -> bytes:
    """16 bytes that are equal for bodies that ask the same route for the same answer; `media` was
    taken out of the body. Raises InvalidRequest.
    """
    try:
        content = load_in_turns(body.decode("utf-8-sig", "surrogateescape"))
    except ValueError as error:  # in a field that is not read otherwise
        raise InvalidRequest("INVALID_JSON", f"the body is not valid JSON: {error}") from None
    asked = {name: value for name, value in content.items() if name not in _NOT_HASHED}
    text = json.dumps([route, _small(asked, media)], sort_keys=True, separators=(",", ":"))
    return digest(text.encode())


def _small(value: Any, media: InlineMedia) -> Any:
    """The same with large strings replaced by their digests."""
    if isinstance(value, dict):
        return {name: _small(inner, media) for name, inner in value.items()}
    if isinstance(value, list):
        is_plain = {*map(type, value)} <= {int, float}  # a prompt of ids may be long
        return value if is_plain else [_small(inner, media) for inner in value]
    if isinstance(value, str):
        head, _, data = value.partition(",")
        found = media.find(data)
        if found is not None:
            return [head, digest(found).hex()]
        if len(data) > _LARGE:
            return [head, digest(data.encode("utf-8", "surrogatepass")).hex()]
    return value


def digest(data: bytes | memoryview) -> bytes:
    """16 bytes."""
    return hashlib.blake2b(data, digest_size=16).digest()


def _key(header: Header) -> str:
    key = header("idempotency-key").strip()
    if len(key) > _LONGEST_KEY:
        raise _wrong("Idempotency-Key", f"must not be longer than {_LONGEST_KEY} characters")
    return key


def _keep_ms(header: Header, has_key: bool) -> int:
    name = "X-Tessera-Resume"
    given = header(name.lower()).strip()
    if not given:
        return KEEP_S * 1000 if has_key else 0
    is_number = given.isascii() and given.isdigit() and len(given) <= 9
    if not is_number or int(given) > _LONGEST_KEEP_S:
        raise _wrong(
            name,
            f"must be a whole number of seconds from 0 to {_LONGEST_KEEP_S}, not {given[:24]!r}",
        )
    return int(given) * 1000


def _event_ids(header: Header, resumes: bool) -> bool:
    """Said outright, or by whatever else `resumes`."""
    name = "X-Tessera-Event-Ids"
    given = header(name.lower()).strip()
    if given not in ("", "0", "1"):
        raise _wrong(name, f"must be 1 or 0, not {given[:24]!r}")
    return given == "1" or (resumes and not given)


def _prio(header: Header, options: GenerationOptions) -> str:
    name = "X-Tessera-Priority"
    given = header(name.lower()).strip().lower()
    if given and given not in _CLASSES:
        raise _wrong(name, f"must be {' or '.join(_CLASSES)}, not {given[:24]!r}")
    tier = options.service_tier or "auto"
    if tier not in _TIERS:
        raise wrong("service_tier", f"must be one of {', '.join(_TIERS)}, not {tier[:24]!r}")
    return given or _CLASSES[tier == _BATCH_TIER]


def _timeouts(header: Header, options: GenerationOptions, limits: Timeouts) -> Timeouts:
    wanted = _seconds(header, "X-Tessera-Request-Timeout")
    if options.timeout is not None:
        wanted = number("timeout", options.timeout, 0.0, 0.0, _LONGEST_TIMEOUT_S)
        if wanted == 0:
            raise wrong("timeout", "must be greater than 0: leave it out for none")
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
