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


def clients_name(given: str) -> str:
    """The name that a client gave, empty if it cannot be used."""
    return given if _CLIENTS_NAME.fullmatch(given) else ""


def names(request_id: str, client_request_id: str = "") -> dict[str, str]:
    """The fields of a log line."""
    if not client_request_id:
        return {"request_id": request_id}
    return {"request_id": request_id, "client_request_id": client_request_id}


def bind(request_id: str, client_request_id: str = "") -> None:
    """From now on every line of this task is about this request."""
    structlog.contextvars.bind_contextvars(**names(request_id, client_request_id))


def unbind() -> None:
    """From now on the lines of this task are about no request in particular."""
    structlog.contextvars.unbind_contextvars("request_id", "client_request_id")


def metadata() -> tuple[tuple[str, str], ...]:
    """The names of the current request, as the metadata of a call for it; one that metadata cannot hold is left
    out.
    """
    bound = structlog.contextvars.get_contextvars()
    pairs = ((_OUR_KEY, bound.get("request_id")), (_CLIENTS_KEY, bound.get("client_request_id")))
    return tuple((key, name) for key, given in pairs if (name := clients_name(str(given or ""))))


def bind_metadata(given: Iterable[tuple[str, Any]] | None) -> None:
    """Takes the names out of the metadata of a call, where it has any."""
    found = {key: str(value) for key, value in given or () if key in (_OUR_KEY, _CLIENTS_KEY)}
    ours, clients = found.get(_OUR_KEY, ""), clients_name(found.get(_CLIENTS_KEY, ""))
    known = {"request_id": ours if _OUR_NAME.fullmatch(ours) else "", "client_request_id": clients}
    structlog.contextvars.bind_contextvars(**{key: name for key, name in known.items() if name})
