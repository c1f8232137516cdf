"""Numbers and strings of a `.flm`, each checked against the end of the file. Standard library only."""

import struct
from typing import NoReturn

from shared.errors import InvalidRequest

_INT = struct.Struct("<i")
_FLOAT = struct.Struct("<f")


class Reader:
    """Little-endian values from a place in `data` on. Raises InvalidRequest, with the offset, for what cannot be."""

    def __init__(self, data: memoryview, name: str) -> None:
        self._data = data
        self._name = name
        self.at = 0

    def integer(self) -> int:
        """Of 32 bits, signed."""
        value: int = _INT.unpack(self.take(4, "a number"))[0]
        return value

    def real(self) -> float:
        """Of 32 bits."""
        value: float = _FLOAT.unpack(self.take(4, "a number"))[0]
        return value

    def count(self, what: str, least: int) -> int:
        """How many follow, of at least `least` bytes each."""
        at, value = self.at, self.integer()
        if not 0 <= value <= (len(self._data) - self.at) // least:
            self.refuse(f"{value} {what} do not fit into the file", at)
        return value

    def string(self) -> str:
        """UTF-8 behind its length."""
        at = self.at
        try:
            return bytes(self.take(self.count("bytes of text", 1), "a text")).decode()
        except UnicodeDecodeError:
            self.refuse("a text is not UTF-8", at)

    def word(self) -> bytes:
        """Bytes behind their number, each written as an integer, whose sign depends on the writer's compiler."""
        return bytes(self.take(4 * self.count("bytes of a token", 4), "a token")[::4])

    def take(self, size: int, what: str) -> memoryview:
        """The next bytes, without a copy; `what` they are."""
        begin = self.at
        if size > len(self._data) - begin:
            self.refuse(f"the file ends within {what}", begin)
        self.at = begin + size
        return self._data[begin : self.at]

    def require_end(self) -> None:
        """Raises InvalidRequest if something follows."""
        if rest := len(self._data) - self.at:
            self.refuse(f"{rest} bytes follow the last tensor", self.at)

    def refuse(self, what: str, at: int) -> NoReturn:
        """Raises InvalidRequest with an offset."""
        raise InvalidRequest("BAD_FLM", f"{self._name}: {what}, at byte {at}")
