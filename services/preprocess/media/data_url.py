"""data: URLs (RFC 2397): the file inside the address."""

import base64
import binascii
from urllib.parse import unquote_to_bytes

from shared.errors import InvalidRequest


def is_data_url(url: str) -> bool:
    """Whether the address is the file."""
    return url[:5].lower() == "data:"


def decode_data_url(url: str, max_bytes: int) -> bytes:
    """The bytes in a data: URL, base64 or percent-encoded. Raises InvalidRequest."""
    head, comma, body = url[5:].partition(",")
    if not comma:
        raise InvalidRequest("MEDIA_URL", "a data: URL has a comma before its data")
    is_base64 = head.lower().rstrip().endswith(";base64")
    # Checked before it is decoded; base64 makes four characters of three bytes.
    if len(body) > (max_bytes * 4 // 3 + 4 if is_base64 else max_bytes * 3):
        raise InvalidRequest("MEDIA_TOO_LARGE", f"media are limited to {max_bytes} bytes")
    try:
        data = _base64(body) if is_base64 else unquote_to_bytes(body)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest("MEDIA_URL", f"bad base64 in the data: URL: {error}") from error
    return data


def _base64(body: str) -> bytes:
    body = unquote_to_bytes(body).decode("ascii") if "%" in body else body
    body = "".join(body.split()).replace("-", "+").replace("_", "/")
    return base64.b64decode(body + "=" * (-len(body) % 4), validate=True)
