"""The errors that requests of this process ended with lately, for GET /v1/system."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from shared.environment import unix_time
from shared.errors import ServingError

_MOST = 50


class RecentError(NamedTuple):
    """One of them, without its message, which may quote what a client sent."""

    at_unix_s: float
    status: int
    code: str
    path: str  # empty for a request that was accepted
    request_id: str  # empty for one that was refused


_recent: deque[RecentError] = deque(maxlen=_MOST)


def note(error: ServingError, path: str = "", request_id: str = "") -> None:
    """A request ended with this error."""
    code = error.reason.lower()
    _recent.append(RecentError(unix_time(), error.http_status, code, path[:200], request_id))


def recent_errors() -> Sequence[RecentError]:
    """At most 50, the latest first."""
    return tuple(reversed(_recent))
