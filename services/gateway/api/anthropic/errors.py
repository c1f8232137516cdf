"""Errors as Anthropic has them, {"type": "error", "error": {"type", "message"}}, about fields under its names."""

import json
from collections.abc import Mapping
from typing import Any

from services.gateway.api.anthropic.refused_fields import THREADS
from services.gateway.api.renamed_fields import renamed
from services.gateway.http.forms import ErrorReply
from shared.errors import ServingError

# Our names of fields, in errors of what all APIs share, and Anthropic's.
_NAMES: Mapping[str, str] = {
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "reasoning_effort": "output_config.effort",
}
_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_OVERLOADED = 529  # where other APIs say 503
# What Anthropic's clients know an error by, where they do something about it: without threads they send all turns.
_DETAILS: Mapping[str, Mapping[str, Any]] = {
    THREADS: {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
}


def error_content(error: ServingError) -> Mapping[str, Any]:
    """The body of a response, or what an event says."""
    default = "api_error" if error.http_status >= 499 else "invalid_request_error"
    kind = _TYPES.get(error.http_status, default)
    said: dict[str, Any] = {"type": kind, "message": renamed(error, _NAMES).message}
    if error.reason in _DETAILS:
        said["details"] = _DETAILS[error.reason]
    return {"type": "error", "error": said}


def error_reply(error: ServingError) -> ErrorReply:
    """A whole response."""
    status = _OVERLOADED if error.http_status == 503 else error.http_status
    return ErrorReply(status, json.dumps(error_content(error), ensure_ascii=False).encode())
