"""The keys of a vision part. Every error names the key."""

import struct
from collections.abc import Sequence
from typing import Any

from shared.checkpoint.gguf.header import GgufHeader
from shared.checkpoint.gguf.keys import Keys

_MOST = 1 << 24  # of any size that is given as a number
_DIGITS = 9  # with which every float32 is written
# Mean and deviation of CLIP's pictures, of which others have as few digits and are the same float32.
_KNOWN = (0.48145466, 0.4578275, 0.40821073, 0.26862954, 0.26130258, 0.27577711)


class VisionKeys(Keys):
    """Those below `clip.vision.` by what follows; all others that begin with `clip.` by their whole names."""

    def __init__(self, header: GgufHeader) -> None:
        super().__init__(header, "clip.vision")

    def full(self, key: str) -> str:
        """See `Keys.full`."""
        return key if key.startswith("clip.") else super().full(key)

    def whole(self, key: str, default: int | None = None) -> int:
        """A number from 1 on."""
        found = super().whole(key, default)
        if found > _MOST:
            raise self.wrong(key, found)
        return found

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0, of float32."""
        found = super().number(key, default)
        if not 0 < found < _MOST:
            raise self.wrong(key, found)
        return shortest(found)

    def three(self, key: str) -> list[float]:
        """Numbers of red, green and blue."""
        found = self.value(key)
        if not isinstance(found, tuple) or len(found) != 3:
            raise self.wrong(key, found)
        if not all(type(number) in (int, float) and abs(number) < _MOST for number in found):
            raise self.wrong(key, found)
        return [shortest(number) for number in found]

    def wholes(self, key: str) -> Sequence[int]:
        """A list of numbers, of which none is below 0; nothing where it is not there."""
        found: Any = self.value(key, ())
        if not isinstance(found, tuple) or not all(
            type(number) is int and 0 <= number <= _MOST for number in found
        ):
            raise self.wrong(key, found)
        return found


def shortest(number: float) -> float:
    """The decimal of fewest digits that is this number in float32: what a configuration said before it was stored."""
    stored = struct.pack("<f", number)
    shorter = (float(f"{number:.{digits}g}") for digits in range(1, _DIGITS))
    return next((one for one in (*_KNOWN, *shorter) if struct.pack("<f", one) == stored), number)
