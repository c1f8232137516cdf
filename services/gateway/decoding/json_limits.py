"""Limits on the depth and the number of values of a JSON text, checked before anything is built from it.

Decoding JSON holds Python's global lock, in a thread too: a text of some megabytes that is nothing but small values
would stop all other threads for a second, and what is built from it takes many times its size. So values are counted
first, in slices between which other threads can run.
"""

from itertools import accumulate

from shared.errors import InvalidRequest

DEEPEST = 64
MOST_VALUES = 1_000_000

_SLICE = 256 << 10
_CHANGE = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS = bytes(set(range(256)) - set(_CHANGE))


def check_json(text: bytes, deepest: int = DEEPEST, slice_bytes: int = _SLICE) -> None:
    """Raises InvalidRequest, naming the limit, for a text that is nested deeper than `deepest` or holds too much.
    Whether it is valid JSON is not checked. `slice_bytes` are counted without a break.
    """
    openings = text.count(b"[") + text.count(b"{")
    if openings <= deepest and openings + text.count(b",") <= MOST_VALUES:
        return  # nearly always
    scan = _Scan(deepest)
    at = 0
    while at < len(text):
        end = min(at + slice_bytes, len(text))
        while end < len(text) and text[end - 1] == ord("\\"):
            end += 1  # the escaped character belongs to this slice
        scan.read(text[at:end])
        at = end


class _Scan:
    def __init__(self, deepest: int) -> None:
        self._deepest = deepest
        self._depth = 0
        self._values = 1
        self._in_string = False

    def read(self, text: bytes) -> None:
        """Counts the next piece, which does not end in the middle of an escape."""
        if b"\\" in text:
            text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
        # Every quote that is left begins or ends a string.
        parts = text.split(b'"')
        outside = b" ".join(parts[1::2] if self._in_string else parts[::2])
        self._in_string ^= len(parts) % 2 == 0
        brackets = outside.translate(None, _NO_BRACKETS)
        openings = brackets.count(b"[") + brackets.count(b"{")
        self._values += outside.count(b",") + openings
        if self._values > MOST_VALUES:
            raise InvalidRequest(
                "BODY_TOO_RICH", f"the body holds more than {MOST_VALUES} values: send less at once"
            )
        if self._depth + openings > self._deepest:
            steps = map(_CHANGE.__getitem__, brackets)
            if max(accumulate(steps, initial=self._depth)) > self._deepest:
                raise InvalidRequest(
                    "INVALID_JSON",
                    f"the body is nested deeper than the limit of {self._deepest} levels",
                )
        self._depth += 2 * openings - len(brackets)
