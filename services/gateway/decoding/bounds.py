"""Bounds of values whose types have been checked already: every refusal names the field and what it may be."""

from collections.abc import Sequence

from shared.errors import InvalidRequest

# The largest value of an int32, which messages between services have counts and ids in.
INT32_MAX = (1 << 31) - 1


def wrong(field: str, message: str, reason: str = "INVALID_VALUE") -> InvalidRequest:
    """An error about one field, named as `messages[0].content` is."""
    return InvalidRequest(reason, f"{field} {message}", field=field)


def wrong_type(field: str, must: str) -> InvalidRequest:
    """An error about a field of a wrong type; `must`: what it has to be, such as "a list"."""
    return wrong(field, f"must be {must}", "INVALID_TYPE")


def number(field: str, value: float | None, default: float, low: float, high: float) -> float:
    """A number in [low, high]; `default` for None. Raises InvalidRequest."""
    if value is None:
        return default
    if not low <= value <= high:  # nor is it NaN
        raise wrong(field, f"must be between {low:g} and {high:g}, not {_short(value)}")
    return float(value)


def whole(field: str, value: float | None, low: int, high: int) -> int | None:
    """A whole number in [low, high], which may be written 16.0; None stays None. Raises InvalidRequest."""
    if value is None:
        return None
    if isinstance(value, float):
        if not value.is_integer():
            raise wrong(field, f"must be a whole number, not {_short(value)}", "INVALID_TYPE")
        value = int(value)
    if not low <= value <= high:
        raise wrong(field, f"must be between {low} and {high}, not {_short(value)}")
    return value


def wholes(
    field: str, values: Sequence[float] | None, low: int, high: int, most: int | None = None
) -> Sequence[int]:
    """At most so many whole numbers in [low, high]; none for None. Raises InvalidRequest."""
    if not values:
        return ()
    at_most(field, len(values), most)
    # A prompt of ids may be long: its entries are read one by one only to find what is wrong.
    if {*map(type, values)} == {int} and low <= min(values) and max(values) <= high:
        return values  # type: ignore[return-value]
    return [whole(f"{field}[{i}]", item, low, high) or 0 for i, item in enumerate(values)]


def text(field: str, value: str | None, longest: int) -> str:
    """A string of at most so many characters; empty for None. Raises InvalidRequest."""
    if value is None:
        return ""
    if len(value) > longest:
        raise wrong(field, f"must not be longer than {longest} characters")
    return value


def texts(field: str, value: str | Sequence[str] | None, most: int, longest: int) -> Sequence[str]:
    """A string or at most so many, none of them empty; none for None. Raises InvalidRequest."""
    if value is None:
        return ()
    values = [value] if isinstance(value, str) else value
    if len(values) > most:
        raise wrong(field, f"must not hold more than {most} strings")
    for index, item in enumerate(values):
        text(f"{field}[{index}]", item, longest)
    if "" in values:
        raise wrong(field, "must not hold an empty string")
    return values


def at_most(field: str, count: int, most: int | None, what: str = "entries") -> None:
    """Raises InvalidRequest for a list of more than so many."""
    if most is not None and count > most:
        raise wrong(field, f"must not hold more than {most} {what}, not {count}")


def _short(value: float) -> str:
    shown = str(value) if isinstance(value, float) or abs(value) < 1 << 64 else "a larger number"
    return shown[:24]
