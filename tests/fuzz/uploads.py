"""Forms that upload a file: right ones, in which something is then made wrong."""

import random

_BOUNDARY = b"next"
FORM_TYPE = "multipart/form-data; boundary=next"
_FIELDS = [
    (b"purpose", b"batch"), (b"purpose", b"vision"), (b"purpose", b"\xff" * 30), (b"", b""), (b"unknown", b"x" * 2000),
    (b"expires_after[anchor]", b"created_at"), (b"expires_after[seconds]", b"3600"),
    (b"expires_after[seconds]", b"-1e9"),
]  # fmt: skip
_HEADERS = [
    b"",
    b"Content-Type: text/plain\r\n",
    b"X: " + b"y" * 5000 + b"\r\n",
    b"bad header\r\n",
    b": \r\n" * 20,
]
_NAMES = [b"a.jsonl", b"../../etc/passwd", b"\xe2\x98\x83" * 200, b"", b"\x00", b'"']


def form(draw: random.Random, content: bytes) -> bytes:
    """A form that sends `content` as a file; two of three are made wrong."""
    parts = [_part(draw, b"purpose", b"batch", b""), _file(draw, content)]
    if draw.random() < 0.6:
        parts = [_part(draw, *draw.choice(_FIELDS), b"") for _ in range(draw.randint(0, 20))]
        parts += [_file(draw, content) for _ in range(draw.randint(0, 2))]
        draw.shuffle(parts)
    written = b"".join(parts) + b"--" + _BOUNDARY + b"--\r\n"
    if draw.random() < 0.3:
        at = draw.randrange(len(written))
        written = (
            written[:at]
            + draw.choice([b"", b"\r\n--next", b"\r\r\n", bytes(9)])
            + written[at + 3 :]
        )
    return written


def _file(draw: random.Random, content: bytes) -> bytes:
    content = content or b"\r\n--nex" * draw.randint(0, 2000)
    return _part(draw, b"file", content, b'; filename="' + draw.choice(_NAMES) + b'"')


def _part(draw: random.Random, name: bytes, content: bytes, more: bytes) -> bytes:
    header = draw.choice(_HEADERS) if draw.random() < 0.2 else b""
    head = b'--%s\r\nContent-Disposition: form-data; name="%s"%s\r\n' % (_BOUNDARY, name, more)
    return head + header + b"\r\n" + content + b"\r\n"
