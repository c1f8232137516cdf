"""The fields of a JSON body, read with strict types: every refusal names the field and what it may
be.
"""

import asyncio
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from services.gateway.reading.json_limits import check_json
from shared.errors import InvalidRequest

# A millisecond of work.
_LARGE = 64 << 10

_T = TypeVar("_T")


def parse_body(body: bytes) -> dict[str, Any]:
    """The JSON object in a request body. Raises InvalidRequest."""
    check_json(body)
    try:
        # In UTF-8 alone, which is what was checked; with a hook, since Python's other threads go on in it.
        text = body.decode("utf-8-sig", "surrogatepass")
        content = json.loads(text, object_hook=lambda found: found)
    except ValueError as error:
        raise InvalidRequest("INVALID_JSON", f"the body is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise InvalidRequest("INVALID_JSON", "the body must be a JSON object")
    return content


async def off_the_loop(read: Callable[[bytes], _T], body: bytes) -> _T:
    """What `read` makes of a body: at once of a small one, in a thread of a large one."""
    return await asyncio.to_thread(read, body) if len(body) > _LARGE else read(body)


class Fields:
    """One JSON object. A field that is absent or null gives the default."""

    def __init__(self, content: Mapping[str, Any], path: str = "") -> None:
        self._content = content
        self._path = path

    def __contains__(self, name: str) -> bool:
        return self._content.get(name) is not None

    def raw(self, name: str) -> Any:
        """The value as it came; None if absent."""
        return self._content.get(name)

    def path(self, name: str) -> str:
        """How errors call a field: `messages[0].content`."""
        return f"{self._path}.{name}" if self._path else name

    def wrong(self, name: str, message: str, reason: str = "INVALID_VALUE") -> InvalidRequest:
        """An error about one field."""
        path = self.path(name)
        return InvalidRequest(reason, f"{path} {message}", field=path)

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """A finite number in [low, high]."""
        value = self._content.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(name, f"must be a number, not {_kind(value)}", "INVALID_TYPE")
        # Compared before the conversion: an integer may be larger than any float.
        if not low <= value <= high or not math.isfinite(value):
            raise self.wrong(name, f"must be between {low:g} and {high:g}, not {_short(value)}")
        return float(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        """A whole number in [low, high], or None."""
        value = self._content.get(name)
        return None if value is None else self._whole(name, value, low, high)

    def boolean(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._content.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, f"must be true or false, not {_kind(value)}", "INVALID_TYPE")
        return value

    def string(self, name: str, default: str = "", *, longest: int | None = None) -> str:
        """A string that can be written in UTF-8."""
        value = self._content.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(name, f"must be a string, not {_kind(value)}", "INVALID_TYPE")
        if longest is not None and len(value) > longest:
            raise self.wrong(name, f"must not be longer than {longest} characters")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise self.wrong(name, "holds half of a surrogate pair") from None
        return value

    def strings(self, name: str, most: int, longest: int) -> list[str]:
        """A string or a list of strings, none of them empty."""
        value = self._content.get(name)
        if value is None:
            return []
        values = self._listed(name, value) if not isinstance(value, str) else [value]
        if len(values) > most:
            raise self.wrong(name, f"must not hold more than {most} strings")
        entries = Fields({f"{name}[{i}]": v for i, v in enumerate(values)}, self._path)
        strings = [entries.string(f"{name}[{i}]", longest=longest) for i in range(len(values))]
        if "" in strings:
            raise self.wrong(name, "must not hold an empty string or null")
        return strings

    def integers(self, name: str, low: int, high: int, most: int | None = None) -> list[int]:
        """A list of at most so many whole numbers, each in [low, high]."""
        value = self._content.get(name)
        if value is None:
            return []
        items = self._listed(name, value, most)
        # A prompt of ids may be long: one by one only to find what is wrong.
        if items and {*map(type, items)} == {int} and low <= min(items) and max(items) <= high:
            return list(items)
        return [self._whole(f"{name}[{i}]", item, low, high) for i, item in enumerate(items)]

    def mapping(self, name: str) -> "Fields":
        """An object; an empty one if absent."""
        value = self._content.get(name)
        if value is None:
            return Fields({}, self.path(name))
        if not isinstance(value, dict):
            raise self.wrong(name, f"must be an object, not {_kind(value)}", "INVALID_TYPE")
        return Fields(value, self.path(name))

    def items(self) -> Sequence[tuple[str, Any]]:
        """All names and values."""
        return list(self._content.items())

    def objects(self, name: str, most: int) -> list["Fields"]:
        """A list of at most so many objects."""
        listed = self._listed(name, self._content.get(name), most)
        for i, item in enumerate(listed):
            if not isinstance(item, dict):
                raise self.wrong(
                    f"{name}[{i}]", f"must be an object, not {_kind(item)}", "INVALID_TYPE"
                )
        return [Fields(item, self.path(f"{name}[{i}]")) for i, item in enumerate(listed)]

    def _listed(self, name: str, value: Any, most: int | None = None) -> list[Any]:
        if not isinstance(value, list):
            raise self.wrong(name, f"must be a list, not {_kind(value)}", "INVALID_TYPE")
        if most is not None and len(value) > most:
            raise self.wrong(name, f"must not hold more than {most} entries, not {len(value)}")
        return value

    def _whole(self, name: str, value: Any, low: int, high: int) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # some clients write 16.0
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(name, f"must be a whole number, not {_kind(value)}", "INVALID_TYPE")
        if not low <= value <= high:
            raise self.wrong(name, f"must be between {low} and {high}, not {_short(value)}")
        return value


def _kind(value: Any) -> str:
    names = {bool: "a boolean", str: "a string", list: "a list", dict: "an object"}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return names.get(type(value), "null" if value is None else "a number")


def _short(value: float) -> str:
    text = str(value) if isinstance(value, float) or abs(value) < 1 << 64 else "a larger number"
    return text[:24]
