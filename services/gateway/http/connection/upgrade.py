"""Requests that offer to go on in another protocol, as Java's client offers HTTP/2 to every server without TLS.

A server may ignore the offer (RFC 9110, 7.8). The parser of uvicorn does not: it ends the message behind the head, and
takes the body for something else. So the head is written anew, without the offer, for the parser to read it again.
"""

from collections.abc import Iterable

_OFFER = (b"upgrade", b"http2-settings")


def head_without_offer(
    method: bytes, url: bytes, version: str, headers: Iterable[tuple[bytes, bytes]]
) -> bytes:
    """The head of the same request, whose header names are in lower case, with what it offers left out."""
    lines = [b"%s %s HTTP/%s\r\n" % (method, url, version.encode())]
    for name, value in headers:
        if name in _OFFER:
            continue
        if name == b"connection":
            options = [option.strip() for option in value.split(b",")]
            value = b", ".join(option for option in options if option.lower() not in _OFFER)
        lines.append(b"%s: %s\r\n" % (name, value))
    return b"".join(lines) + b"\r\n"
