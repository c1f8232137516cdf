"""Stop strings in an output of bytes that grows: one table for a request, a few numbers for each of its choices.

Stop strings are searched in bytes, not characters: a token may end in the middle of a character,
and UTF-8 is self-synchronizing, so a match in bytes is a match in text. Only the standard library
is used here, because the pure core of the scheduler holds searches too.
"""

from array import array
from collections.abc import Sequence

__all__ = ["StopSearch", "StopStrings"]


class StopStrings:
    """The stop strings of a request, and what the searches of all its choices share.

    That is where to go on after a mismatch: for the beginning of a stop string that the output ends with, the next
    shorter one that it ends with too (the borders of Knuth, Morris and Pratt). They are computed when an output
    first needs them and as far as it has got into a string, so a request costs nothing for them at its start and 4
    bytes for each byte of its stop strings at most.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ValueError for an empty stop string."""
        if not all(stops):
            raise ValueError("a stop string is empty")
        self.texts = tuple(stops)
        self.raw = tuple(stop.encode("utf-8") for stop in stops)
        self._first_bytes = frozenset(raw[0] for raw in self.raw)
        # For each string: item `n - 1` is the border of its first n bytes.
        self._borders = [array("I", [0]) for _ in self.raw]

    def may_begin_in(self, data: bytes) -> bool:
        """Whether a stop string may begin in `data`."""
        return not self._first_bytes.isdisjoint(data)

    def advance(self, index: int, length: int, data: bytes) -> tuple[int, int]:
        """Reads `data` after an output that ends with the first `length` bytes of a stop string, and no more of them.

        Returns how many of its first bytes the output ends with then, and 0; where the string is completed, its whole
        length, and how many bytes of `data` that took.
        """
        raw, at, size = self.raw[index], 0, len(data)
        while at < size:
            if not length:
                at = data.find(raw[0], at) + 1
                if not at:
                    return 0, 0
                length = 1
            elif raw[length] == data[at]:
                length += 1
                at += 1
            else:
                length = self._border(index, length)
                continue
            if length == len(raw):
                return length, at
        return length, 0

    def _border(self, index: int, length: int) -> int:
        """Bytes of the longest part that both begins and ends the first `length` bytes of a string, not all of them."""
        borders, raw = self._borders[index], self.raw[index]
        if length > len(borders):
            border = borders[-1]
            for byte in raw[len(borders) : length]:
                while border and raw[border] != byte:
                    border = borders[border - 1]
                border += raw[border] == byte
                borders.append(border)
        return borders[length - 1]


class StopSearch:
    """Looks for stop strings in the output of one choice, keeping only the end that could begin one."""

    __slots__ = ("_found", "_lengths", "_stops", "held")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._lengths = [0] * len(stops.raw)  # how much of each one the output ends with
        self._found: int | None = None
        # The end of the output: as much as could begin a stop string, or from the one that was found on.
        self.held: bytes | bytearray = b""

    def push(self, data: bytes) -> tuple[bytes, str | None]:
        """Takes the next bytes. Returns the bytes that are certainly no part of a stop string, and the stop string that
        was found.

        The earliest match wins, of two at one place the first in the list. What comes after a match is held.
        """
        if self._found is not None:
            return b"", self._found_longer(data)
        stops = self._stops
        if not self.held and not stops.may_begin_in(data):
            return data, None
        start = len(data)  # of the match, from the beginning of `data`; it may lie before
        for index, length in enumerate(self._lengths):
            self._lengths[index], taken = stops.advance(index, length, data)
            if taken and taken - len(stops.raw[index]) < start:
                start, self._found = taken - len(stops.raw[index]), index
        output = bytes(self.held) + data
        if self._found is None:
            certain = len(output) - max(self._lengths)
            self.held = output[certain:]
            return output[:certain], None
        certain = len(self.held) + start
        self.held = bytearray(output[certain:])
        return output[:certain], stops.texts[self._found]

    def _found_longer(self, data: bytes) -> str:
        """The match after more output: one that begins at its place, and comes before it in the list, may be longer."""
        assert self._found is not None
        self.held += data
        for index, raw in enumerate(self._stops.raw[: self._found]):
            if self.held.startswith(raw):
                self._found = index
                break
        return self._stops.texts[self._found]
