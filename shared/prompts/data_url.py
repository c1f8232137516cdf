"""data: URLs (RFC 2397). Base64 and percent-encoding are decoded in slices, between which other threads can run, and
without copies beside the result.
"""

import base64
import io
from collections.abc import Collection, Iterable, Iterator

import numpy as np
import numpy.typing as npt

# Characters decoded at a time: under a millisecond.
_SLICE = 128 << 10
_PERCENT = ord("%")
_BLANKS = b" \t\n\r\x0b\x0c"
_NO_DIGIT = 16
_DIGITS = np.full(256, _NO_DIGIT, np.uint8)
for _digit in "0123456789abcdefABCDEF":
    _DIGITS[ord(_digit)] = int(_digit, 16)


class BadDataUrl(ValueError):
    """Its text goes behind the name of the field that holds the URL."""


def is_data_url(url: str) -> bool:
    """Whether the data stand in the URL."""
    return url[:5].lower() == "data:"


def data_url_head(url: str) -> tuple[str, list[str]]:
    """A data URL's media type and parameters. Raises BadDataUrl."""
    # data:[<mediatype>][;base64],<data>
    comma = url.find(",")
    if comma < 0:
        raise BadDataUrl("is a data URL without a comma before its data")
    kind, *parameters = url[5:comma].lower().split(";")
    return kind, [parameter.strip() for parameter in parameters]


def is_base64(parameters: Collection[str]) -> bool:
    """Whether the data of a URL with these parameters are in base64, not in percent-encoding."""
    return "base64" in parameters


def decode_data(data: str | bytes | memoryview, in_base64: bool) -> bytes:
    """The bytes of what stands behind the comma. Raises BadDataUrl for wrong base64 and for nothing."""
    raw = data.encode() if isinstance(data, str) else data
    try:
        content = base64_bytes(raw) if in_base64 else percent_bytes(raw)
    except ValueError as error:  # binascii.Error among them
        raise BadDataUrl(f"is not valid base64: {error}") from None
    if not content:
        raise BadDataUrl("is a data URL without data")
    return content


def percent_bytes(data: bytes | memoryview) -> bytes:
    """What stands in percent-encoding (RFC 3986, 2.1). A percent sign without two digits stands for itself."""
    out = io.BytesIO()
    for some in _unquoted(data):
        out.write(some)
    return out.getvalue()


def base64_bytes(data: bytes | memoryview) -> bytes:
    """What stands in base64, maybe with line breaks, blanks and percent-encoding in it. Raises ValueError."""
    try:
        return _base64(data[start : start + _SLICE] for start in range(0, len(data), _SLICE))
    except ValueError:  # binascii.Error among them; these are rare, so they are looked for second
        return _base64(some.translate(None, _BLANKS) for some in _unquoted(data))


def _base64(slices: Iterable[bytes | memoryview]) -> bytes:
    out, rest, has_ended = io.BytesIO(), b"", False
    for some in slices:
        whole = rest + bytes(some) if rest else some
        size = len(whole) // 4 * 4
        rest = bytes(whole[size:])
        if has_ended and whole:
            raise ValueError("padding in the middle")
        out.write(base64.b64decode(whole[:size], validate=True))
        has_ended = size > 0 and bytes(whole[size - 1 : size]) == b"="
    if has_ended and rest:
        raise ValueError("padding in the middle")
    out.write(base64.b64decode(rest, validate=True))  # raises where something is left
    return out.getvalue()


def _unquoted(data: bytes | memoryview) -> Iterator[bytes]:
    raw = np.frombuffer(data, np.uint8)
    at = 0
    while at < len(raw):
        end = min(at + _SLICE, len(raw))
        if end < len(raw):  # what an escape begins with goes to the next slice
            for back in (1, 2):
                if raw[end - back] == _PERCENT:
                    end -= back
                    break
        yield _unquoted_slice(raw[at:end])
        at = end


def _unquoted_slice(raw: npt.NDArray[np.uint8]) -> bytes:
    places = np.flatnonzero(raw[:-2] == _PERCENT)
    if not len(places):
        return raw.tobytes()
    high, low = _DIGITS[raw[places + 1]], _DIGITS[raw[places + 2]]
    is_escape = (high < _NO_DIGIT) & (low < _NO_DIGIT)
    places = places[is_escape]
    out = raw.copy()
    out[places] = 16 * high[is_escape] + low[is_escape]
    kept = np.ones(len(raw), np.bool_)
    kept[places + 1] = kept[places + 2] = False
    return out[kept].tobytes()
