"""What Lua does with numbers and strings, where Python does otherwise."""

import math


def number_text(value: float | int) -> str:
    """A number as it reaches Redis: whole ones without a point."""
    if isinstance(value, int):
        return str(value)
    if value.is_integer() and abs(value) < 1e17:
        return str(int(value))
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return f"{value:.17g}"


def tonumber(value: str | int | float | None) -> int | float | None:
    """A number, or None for what is none."""
    if value is None or isinstance(value, int | float):
        return value
    try:
        number = float(value)
    except ValueError:
        return None
    return int(number) if number.is_integer() else number


def byte(data: str, at: int) -> int:
    """The byte at an index that counts from one."""
    return ord(data[at - 1])


def sub(data: str, first: int, last: int | None = None) -> str:
    """string.sub with indices that count from one."""
    return data[first - 1 : last]


def char(*codes: int) -> str:
    """string.char."""
    return "".join(map(chr, codes))
