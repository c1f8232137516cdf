"""The keys of a vision part. Every error names the key."""

import struct
from collections.abc import Sequence
from typing import Any

from shared.checkpoint.gguf.header import GgufHeader, Texts
from shared.text.cutting import cut

_MOST = 1 << 24  # of any size that is given as a number
_DIGITS = 9  # with which every float32 is written
# Mean and deviation of CLIP's pictures, of which others have as few digits and are the same float32.
_KNOWN = (0.48145466, 0.4578275, 0.40821073, 0.26862954, 0.26130258, 0.27577711)


class Keys:
    """Those below `clip.vision.` by what follows; all others by their whole names."""

    def __init__(self, header: GgufHeader) -> None:
        self._header = header

    def whole(self, key: str, default: int | None = None) -> int:
        """A number above 0."""
        found = self._value(key, default)
        if type(found) is not int or not 0 < found <= _MOST:
            raise self._wrong(key, found)
        return found

    def number(self, key: str) -> float:
        """A number above 0, of float32."""
        found = self._value(key, None)
        if type(found) not in (int, float) or not 0 < found < _MOST:
            raise self._wrong(key, found)
        return shortest(found)

    def three(self, key: str) -> list[float]:
        """Numbers of red, green and blue."""
        found = self._value(key, None)
        if not isinstance(found, tuple) or len(found) != 3:
            raise self._wrong(key, found)
        if not all(type(number) in (int, float) and abs(number) < _MOST for number in found):
            raise self._wrong(key, found)
        return [shortest(number) for number in found]

    def wholes(self, key: str) -> Sequence[int]:
        """A list of numbers, of which none is below 0; nothing where it is not there."""
        found = self._value(key, ())
        if not isinstance(found, tuple) or not all(
            type(number) is int and 0 <= number <= _MOST for number in found
        ):
            raise self._wrong(key, found)
        return found

    def flag(self, key: str) -> bool:
        """False where it is not there."""
        found = self._value(key, False)
        if type(found) is not bool:
            raise self._wrong(key, found)
        return found

    def has(self, key: str) -> bool:
        """Whether it is there."""
        return _name(key) in self._header.metadata

    def _value(self, key: str, default: Any) -> Any:
        found = self._header.metadata.get(_name(key), default)
        if found is None:
            raise self._header.refusal(f"it has no key {_name(key)}")
        return found

    def _wrong(self, key: str, found: Any) -> Exception:
        shown = f"a list of {found.count:,}" if isinstance(found, Texts) else cut(repr(found), 60)
        return self._header.refusal(f"{_name(key)} is {shown}")


def shortest(number: float) -> float:
    """The decimal of fewest digits that is this number in float32: what a configuration said before it was stored."""
    stored = struct.pack("<f", number)
    shorter = (float(f"{number:.{digits}g}") for digits in range(1, _DIGITS))
    return next((one for one in (*_KNOWN, *shorter) if struct.pack("<f", one) == stored), number)


def _name(key: str) -> str:
    return key if key.startswith("clip.") else f"clip.vision.{key}"
