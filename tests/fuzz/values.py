"""Values for the fields of a JSON body: of the wrong type, too large, too deep, too many, or nearly right."""

import random
from collections.abc import Callable
from typing import Any

Json = Any
MODEL = "fuzzed"  # the one that is served

_NUMBERS: list[float | int] = [
    0, -1, 1, 2, -0.0, 0.5, 1.5, 1e-320, 1e308, 1e400, -1e400, float("nan"),
    2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**40, 10**400,
]  # fmt: skip
_TEXTS = [
    "", " ", "\0", "a\0b", "\ud800", "\udfff\ud800", "\u202e\u2066", "\ufeff", "́" * 2000, "👩‍👩‍👧‍👦" * 50,
    "<|im_start|>system\n", "<|image_pad|>", "<|vision_start|>", "<image>", "{{ 7 * 7 }}", "{% for x in y %}",
    "../../../etc/passwd", "'; DROP TABLE", "-1", "NaN", "null", "true", "\r\nX-Injected: 1", "%s%n%x", "\x1b[2J",
    "text", "stop", "user", "system", "assistant", "json_object", "auto", "none", "high", "tessera-demo",
]  # fmt: skip
_HOSTS = ["", "localhost", "127.0.0.1", "[::1]", "0", "0x7f000001", "169.254.169.254", "192.0.0.192",
          "[64:ff9b:1::1]", "[::ffff:10.0.0.1]", "a" * 64 + ".example", "a." * 2000 + "example",
          "xn--" + "z" * 80, "é" * 300, "example.invalid", "user:pass@127.0.0.1", "a b", "\0", "[", "[::1"]  # fmt: skip
_SCHEMES = [
    "http://",
    "https://",
    "file:///",
    "ftp://",
    "data:",
    "HTTP://",
    "//",
    "javascript:",
    "",
]
_LONG = 100_000
_MANY = 20_000
_DEEP = 2_000


def number(draw: random.Random) -> float | int:
    """Any number, most often one at the edge of some type."""
    if draw.random() < 0.3:
        return draw.randint(-100, 600)
    return draw.choice(_NUMBERS)


def text(draw: random.Random) -> str:
    """Text that may be long, no valid Unicode, or mean something to somebody."""
    kind = draw.random()
    if kind < 0.05:
        return draw.choice("aé漢 \n\0") * draw.randint(1, _LONG)
    if kind < 0.3:
        return "".join(chr(draw.randrange(1, 0x3000)) for _ in range(draw.randint(0, 40)))
    return draw.choice(_TEXTS)


def url(draw: random.Random) -> str:
    """The address of a picture."""
    if draw.random() < 0.5:
        return (
            draw.choice(_SCHEMES)
            + draw.choice(_HOSTS)
            + draw.choice(["", "/", ":0/", ":99999/x", "/../x?y#z"])
        )
    kind = draw.choice(
        ["image/png", "image/jpeg", "image/gif", "video/jpeg", "video/mp4", "text/html", ""]
    )
    coding = draw.choice([";base64", "", ";charset=utf-8;base64", ";BASE64"])
    return f"data:{kind}{coding},{draw.choice(['', '====', 'AAAA', 'iVBORw0KGgo=', '!!!', text(draw)])}"


def deep(draw: random.Random) -> Json:
    """Lists or objects in each other."""
    value: Json = draw.choice([0, "x", None])
    as_list = draw.random() < 0.5
    for _ in range(draw.choice([10, 100, 900, _DEEP])):
        value = [value] if as_list else {"a": value}
    return value


def many(draw: random.Random) -> list[Json]:
    """A list of many equal things."""
    return [draw.choice([0, "a", None, {}, [], -1, 1.5])] * draw.choice([33, 1000, _MANY])


def any_value(draw: random.Random) -> Json:
    """Any of these, or a small structure of them."""
    makers: list[Callable[[random.Random], Json]] = [number, number, text, text, url, deep, many]
    kind = draw.randrange(len(makers) + 4)
    if kind < len(makers):
        return makers[kind](draw)
    if kind == len(makers):
        return draw.choice([None, True, False])
    if kind == len(makers) + 1:
        return [any_value(draw) for _ in range(draw.randint(0, 3))]
    return {
        draw.choice(["type", "text", "url", "role", "content", "image_url", ""]): any_value(draw)
    }
