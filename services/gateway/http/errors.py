"""Errors of HTTP itself, and errors as OpenAI's JSON: {"error": {"message", "type", "param", "code"}}."""

import json

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from shared.errors import Expired, InvalidRequest, NotFound, ServingError

# A service that is away is mostly back within seconds.
_RETRY_S = b"2"
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_exceeded"}


class BodyTooLarge(InvalidRequest):
    """More bytes than the limit."""

    http_status = 413


class WrongMediaType(InvalidRequest):
    """A body that is not JSON."""

    http_status = 415


class MethodNotAllowed(InvalidRequest):
    """The route exists, for another method; `allow` in the metadata says which."""

    http_status = 405


class HeadTooLarge(InvalidRequest):
    """More or longer headers than the limit."""

    http_status = 431


class InvalidHttp(InvalidRequest):
    """A request that the HTTP parser cannot read, or that breaks a limit."""


class TooSlow(Expired):
    """The client took too long to send its request."""

    http_status = 408


class Forbidden(InvalidRequest):
    """The caller may not do this, whatever its key."""

    http_status = 403


class NoRoute(NotFound):
    """No such path."""


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


def error_response(error: ServingError) -> bytes:
    """A whole response of HTTP/1.1, the last one of its connection."""
    body = error_body(error)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
        *error_headers(error),
    ]
    lines = [b"%s: %s\r\n" % header for header in headers]
    return b"".join([STATUS_LINE[error.http_status], *lines, b"\r\n", body])


def error_headers(error: ServingError) -> list[tuple[bytes, bytes]]:
    """Headers that say more: when to come back, what is allowed."""
    names = {"retry_after_s": b"retry-after", "allow": b"allow"}
    headers = [
        (header, error.metadata[name].encode())
        for name, header in names.items()
        if name in error.metadata
    ]
    if error.http_status == 503 and "retry_after_s" not in error.metadata:
        headers.append((b"retry-after", _RETRY_S))
    if error.http_status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers
