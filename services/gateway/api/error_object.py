"""Errors as OpenAI's JSON, {"error": {"message", "type", "param", "code"}}, which Tessera's own API has too."""

import json

from services.gateway.http.forms import ErrorReply
from shared.errors import ServingError

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_exceeded"}


def error_object(error: ServingError) -> dict[str, object]:
    """The value of `error` in a reply."""
    default = "server_error" if error.http_status >= 499 else "invalid_request_error"
    return {
        "message": error.message,
        "type": _TYPES.get(error.http_status, default),
        "param": error.metadata.get("field"),
        "code": error.reason.lower(),
    }


def error_body(error: ServingError) -> bytes:
    """A whole JSON body."""
    return json.dumps({"error": error_object(error)}, ensure_ascii=False).encode()


def error_reply(error: ServingError) -> ErrorReply:
    """A whole response."""
    return ErrorReply(error.http_status, error_body(error))
