"""What is common to whole responses that are errors, in the form of any API."""

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from services.gateway.http.forms import ErrorForm
from shared.errors import ServingError

# A service that is away is mostly back within seconds.
_RETRY_S = b"2"


def error_response(error: ServingError, form: ErrorForm) -> bytes:
    """A whole response of HTTP/1.1, the last one of its connection."""
    reply = form.error(error)
    headers = [
        (b"content-type", reply.media_type),
        (b"content-length", b"%d" % len(reply.body)),
        (b"connection", b"close"),
        *error_headers(error, form),
    ]
    lines = [b"%s: %s\r\n" % header for header in headers]
    return b"".join([STATUS_LINE[reply.status], *lines, b"\r\n", reply.body])


def error_headers(error: ServingError, form: ErrorForm) -> list[tuple[bytes, bytes]]:
    """Headers that say more: when to come back, what is allowed, by which schemes a key is sent."""
    names = {"retry_after_s": b"retry-after", "allow": b"allow"}
    headers = [
        (header, error.metadata[name].encode())
        for name, header in names.items()
        if name in error.metadata
    ]
    if error.http_status == 503 and "retry_after_s" not in error.metadata:
        headers.append((b"retry-after", _RETRY_S))
    if error.http_status == 401:
        schemes = [place.scheme for place in form.key_headers if place.scheme]
        headers += [(b"www-authenticate", scheme.encode()) for scheme in schemes]
    return headers
