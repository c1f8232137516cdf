"""Errors as TGI has them, {"error", "error_type"}."""

import json

from services.gateway.http.forms import ErrorReply
from shared.errors import InvalidRequest, NotFound, Overloaded, ServingError, Unauthenticated


def error_body(error: ServingError) -> bytes:
    """A whole JSON body."""
    content = {"error": error.message, "error_type": _type(error)}
    return json.dumps(content, ensure_ascii=False).encode()


def error_reply(error: ServingError) -> ErrorReply:
    """A whole response."""
    return ErrorReply(error.http_status, error_body(error))


def _type(error: ServingError) -> str:
    """What TGI's clients know the kind of an error by."""
    if isinstance(error, Overloaded):
        return "overloaded"
    if isinstance(error, Unauthenticated):
        return "authentication"
    if isinstance(error, NotFound):
        return "not_found"
    return "validation" if isinstance(error, InvalidRequest) else "generation"
