"""The line that is logged when a request ends."""

from collections.abc import Sequence
from typing import Any

import structlog

from services.gateway.telemetry.metrics.metrics import finish_reason
from services.gateway.telemetry.recent_errors import RecentErrors
from services.gateway.telemetry.timeline import Timeline
from shared.errors import Cancelled, ServingError, from_failure
from shared.telemetry.request_names import names
from tessera.common.v1.ending_pb2 import Ending
from tessera.scheduler.v1.queue_pb2 import RequestSpec

log = structlog.get_logger(__name__)

# The event of the line.
_ENDED = "request ended"


def log_end(
    spec: RequestSpec,
    timeline: Timeline,
    endings: Sequence[Ending | None],
    worst: Ending | None,
    error: ServingError | None,
    errors: RecentErrors,
    *,
    prompt_tokens: int,
    output_tokens: int,
    resumed: bool,
) -> None:
    """An accepted request is over. `worst` is the ending that says how it went as a whole, `error` the error
    that its client got, if any; `errors` are told of it. Times of one that was `resumed` count from there.
    """
    if error is None and worst is not None and worst.HasField("failure"):
        error = from_failure(worst.failure)
    if error is not None and not isinstance(error, Cancelled):
        errors.note(error, request_id=spec.request_id)
    cached = max((ending.cached_tokens for ending in endings if ending is not None), default=0)
    # Not by the context alone: an answer may be closed by gRPC, which has another one.
    log.info(
        _ENDED,
        **names(spec.request_id, spec.client_request_id, spec.traceparent),
        **_given(tenant=spec.tenant),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached,
        output_tokens=output_tokens,
        **({"resumed": True} if resumed else {"media": len(spec.media)}),
        **_seconds(
            prepare_s=None if resumed else timeline.prepare_s,
            queue_s=timeline.queue_s,
            first_token_s=timeline.first_token_s,
            total_s=timeline.total_s,
        ),
        finish=finish_reason(worst) if error is None else _finish(error),
        **_error_fields(error),
    )


def log_refusal(
    error: ServingError,
    seconds: float,
    errors: RecentErrors,
    *,
    path: str,
    request_id: str = "",
    tenant: str = "",
) -> None:
    """A request was refused before it was accepted, so long after it had arrived. Lines have `request_id` by their
    context.
    """
    if not isinstance(error, Cancelled):
        errors.note(error, path, request_id)
    log.info(
        _ENDED,
        **_given(tenant=tenant),
        path=path,
        total_s=round(seconds, 4),
        finish=_finish(error),
        **_error_fields(error),
    )


def _finish(error: ServingError) -> str:
    return "abort" if isinstance(error, Cancelled) else "error"


def _error_fields(error: ServingError | None) -> dict[str, Any]:
    """The fields about an error. Its message is left out where it may quote what the client sent."""
    if error is None:
        return {}
    fields: dict[str, Any] = {"status": error.http_status, "error": error.reason}
    why = error.message if error.http_status >= 500 else ""
    return fields | _given(field=error.metadata.get("field", ""), why=why)


def _given(**texts: str) -> dict[str, str]:
    return {name: text for name, text in texts.items() if text}


def _seconds(**spans: float | None) -> dict[str, float]:
    return {name: round(span, 4) for name, span in spans.items() if span is not None}
