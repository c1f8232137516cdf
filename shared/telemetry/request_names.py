"""The names of a request in every log line about it: our id, and the client's where it gives one.

Both names travel: in the fields of messages that carry several requests, in the metadata of calls that are for one. In
a process they stand in structlog's context of the task that works for the request.
"""

import re
from collections.abc import Iterable
from typing import Any

import structlog

# X-Request-Id as a client may give it: goes into headers and log lines unchanged.
_CLIENTS_NAME = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)
_OUR_NAME = re.compile(r"r_[0-9a-f]{8}_[0-9a-f]{32}", re.ASCII)
_OUR_KEY, _CLIENTS_KEY = "tessera-request-id", "x-request-id"
_TRACE_KEY = "tessera-trace-id"
_TRACE = re.compile(r"[0-9a-f]{32}", re.ASCII)
# W3C Trace Context, level 1, section 3.2.2: version, trace id, parent id, flags. Ids of zeros are none.
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?",
    re.ASCII,
)


def clients_name(given: str) -> str:
    """The name that a client gave, empty if it cannot be used."""
    return given if _CLIENTS_NAME.fullmatch(given) else ""


def is_our_name(given: str) -> bool:
    """Whether it looks like the id that a gateway gives a request."""
    return _OUR_NAME.fullmatch(given) is not None


def trace_parent(traceparent: str) -> tuple[str, str, bool] | None:
    """The trace, the span in it that is our parent, and whether the caller samples it; None for what is no trace
    context."""
    found = _TRACEPARENT.fullmatch(traceparent)
    return None if found is None else (found[1], found[2], bool(int(found[3], 16) & 1))


def trace_of(request_id: str, traceparent: str = "") -> str:
    """The trace of a request: its client's, else one that is named by the request's own random bits."""
    given = trace_parent(traceparent) if traceparent else None
    return given[0] if given is not None else request_id[-32:]


def names(request_id: str, client_request_id: str = "", traceparent: str = "") -> dict[str, str]:
    """The fields of a log line. `trace_id` is there where the client gave a trace; else it is the end of our id."""
    found = {"request_id": request_id}
    if client_request_id:
        found["client_request_id"] = client_request_id
    if traceparent and (given := trace_parent(traceparent)) is not None:
        found["trace_id"] = given[0]
    return found


def bind(request_id: str, client_request_id: str = "", traceparent: str = "") -> None:
    """From now on every line of this task is about this request."""
    structlog.contextvars.bind_contextvars(**names(request_id, client_request_id, traceparent))


def unbind() -> None:
    """From now on the lines of this task are about no request in particular."""
    structlog.contextvars.unbind_contextvars("request_id", "client_request_id", "trace_id")


def metadata() -> tuple[tuple[str, str], ...]:
    """The names of the current request, as the metadata of a call for it; one that metadata cannot hold is left
    out.
    """
    bound = structlog.contextvars.get_contextvars()
    pairs = (
        (_OUR_KEY, bound.get("request_id")),
        (_CLIENTS_KEY, bound.get("client_request_id")),
        (_TRACE_KEY, bound.get("trace_id")),
    )
    return tuple((key, name) for key, given in pairs if (name := clients_name(str(given or ""))))


def bind_metadata(given: Iterable[tuple[str, Any]] | None) -> None:
    """Takes the names out of the metadata of a call, where it has any."""
    keys = (_OUR_KEY, _CLIENTS_KEY, _TRACE_KEY)
    found = {key: str(value) for key, value in given or () if key in keys}
    ours, clients = found.get(_OUR_KEY, ""), clients_name(found.get(_CLIENTS_KEY, ""))
    trace = found.get(_TRACE_KEY, "")
    known = {
        "request_id": ours if _OUR_NAME.fullmatch(ours) else "",
        "client_request_id": clients,
        "trace_id": trace if _TRACE.fullmatch(trace) else "",
    }
    structlog.contextvars.bind_contextvars(**{key: name for key, name in known.items() if name})
