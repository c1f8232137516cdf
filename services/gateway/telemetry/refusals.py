"""What is told of requests that are refused before they are accepted: a log line, the list of errors, a timeline."""

from typing import Any, NamedTuple

from services.gateway.telemetry.recent_errors import RecentErrors
from services.gateway.telemetry.request_log import log_refusal
from shared.environment import monotonic
from shared.errors import Overloaded, ServingError, Unauthenticated
from shared.telemetry.timeline import Timelines
from tessera.scheduler.v1.queue_pb2 import RequestSpec

# What a request passes on its way in, by the last span that there is of it.
_STAGES = {"": "read", "read": "reserve", "reserve": "prepare", "prepare": "admit"}
_LONGEST_WHY = 300


class Refused(NamedTuple):
    """A request that was refused; `tenant` is None while nobody has shown who calls."""

    request_id: str
    client_request_id: str
    traceparent: str
    path: str
    tenant: str | None


class Refusals:
    """Tells of them, at one gateway."""

    def __init__(self, model_name: str, errors: RecentErrors, timelines: Timelines) -> None:
        self._model_name = model_name
        self._errors = errors
        self._timelines = timelines

    def note(self, error: ServingError, request: Refused, arrived: float) -> None:
        """A request that arrived then (monotonic clock) was refused with this error."""
        log_refusal(
            error,
            monotonic() - arrived,
            self._errors,
            path=request.path,
            request_id=request.request_id,
            tenant=request.tenant or "",
        )
        if request.tenant is None or isinstance(error, Unauthenticated):
            return  # it is nobody's, and would cost Redis something by whoever has no key
        head = RequestSpec(
            request_id=request.request_id,
            client_request_id=request.client_request_id,
            traceparent=request.traceparent,
            model=self._model_name,
        )
        self._timelines.refused(
            request.request_id,
            request.tenant,
            head.SerializeToString(),
            arrived,
            _STAGES,
            **_about(error),
            path=request.path[:200],
        )


def _about(error: ServingError) -> dict[str, Any]:
    """What a timeline says of an error: its message only where that quotes nothing that a client sent."""
    found: dict[str, Any] = {"status": error.http_status, "error": error.reason}
    named = ("field", "retry_after_s")
    found |= {name: error.metadata[name] for name in named if error.metadata.get(name)}
    if error.http_status >= 500 or isinstance(error, Overloaded):
        found["why"] = error.message[:_LONGEST_WHY]
    return found
