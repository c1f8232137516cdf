"""Media as clients send them: data URLs become bytes here, http(s) URLs are passed on unfetched."""

import base64
import binascii
from urllib.parse import unquote_to_bytes

from shared.errors import InvalidRequest
from tessera.preprocess.v1.preprocess_pb2 import Media

_LONGEST_URL = 8192


def read_image_url(url: str, field: str) -> Media:
    """An image from an `image_url`. Raises InvalidRequest naming `field`."""
    scheme = url[:8].lower()
    if scheme.startswith("data:"):
        return Media(data=_data_url_bytes(url, field), field=field)
    if scheme.startswith(("http://", "https://")):
        if len(url) > _LONGEST_URL:
            raise _wrong(field, f"is longer than {_LONGEST_URL} characters")
        return Media(url=url, field=field)
    raise _wrong(field, "must be a data:, http: or https: URL")


def read_image_bytes(content: bytes, field: str) -> Media:
    """An image that came as bytes."""
    if not content:
        raise _wrong(field, "is empty")
    return Media(data=content, field=field)


def _data_url_bytes(url: str, field: str) -> bytes:
    # RFC 2397: data:[<mediatype>][;base64],<data>
    head, comma, body = url[5:].partition(",")
    if not comma:
        raise _wrong(field, "is a data URL without a comma before its data")
    kind, *parameters = head.lower().split(";")
    if kind and not kind.startswith("image/") and kind != "application/octet-stream":
        raise _wrong(field, f"holds {kind[:64]!r}, not an image")
    try:
        if "base64" in (parameter.strip() for parameter in parameters):
            content = _base64_bytes(body)
        else:
            content = unquote_to_bytes(body)
    except (binascii.Error, ValueError) as error:
        raise _wrong(field, f"is not valid base64: {error}") from None
    if not content:
        raise _wrong(field, "is a data URL without data")
    return content


def _base64_bytes(body: str) -> bytes:
    try:
        return base64.b64decode(body, validate=True)
    except binascii.Error:
        # Line breaks and escaped characters are allowed in a URL; they are rare, so they are looked
        # for second.
        cleaned = b"".join(unquote_to_bytes(body).split())
        return base64.b64decode(cleaned, validate=True)


def _wrong(field: str, message: str) -> InvalidRequest:
    return InvalidRequest("INVALID_MEDIA", f"{field} {message}", field=field)
