"""What is appended to the token log, as the serialized `LogEvent` that the script reads and followers get.

A message may be put together from its fields' bytes, in any order; the parts that stay the same for one choice are
made once. One event for each sequence and step is the busiest message of the system.
"""

from dataclasses import dataclass
from functools import lru_cache

from tessera.common.v1.ending_pb2 import Ending
from tessera.scheduler.v1.queue_pb2 import LogEvent

PROMPT = -1  # the "choice" whose log holds the log-probabilities of the prompt

_EVENTS = b"\x0a"  # LogBatch.events, length-delimited
_START = b"\x18"  # LogEvent.start, varint
_RECORDS = b"\x22"  # LogEvent.records, length-delimited
_ENDING = b"\x2a"  # LogEvent.ending, length-delimited
_CONTENT = b"\x3a"  # LogEvent.content, length-delimited
_NUMERICS = b"\x42"  # LogEvent.numerics, length-delimited
_INEXACT = b"\x48\x01"  # LogEvent.inexact, true


@dataclass(frozen=True, slots=True)
class Origin:
    """Where records come from. `content` and `numerics`: of what computes them, as `LogEvent` has them. `is_exact`:
    whether they are promised to be those of an undisturbed run."""

    content: str = ""
    numerics: str = ""
    is_exact: bool = True


UNKNOWN = Origin()


class LogEventWriter:
    """Makes the events of one choice whose records have `stride` bytes."""

    __slots__ = ("_head", "token_prefix")

    def __init__(self, request_id: str, choice: int, stride: int) -> None:
        head = LogEvent(request_id=request_id, choice=choice, stride=0 if stride == 4 else stride)
        self._head = head.SerializeToString()
        size = len(self._head) + len(token_middle(0)) + 4
        # `token_prefix + token_middle(start) + token` is the entry of one record of four bytes.
        self.token_prefix = _EVENTS + _varint(size) + self._head

    def event(
        self,
        start: int,
        records: bytes,
        ending: Ending | None = None,
        origin: Origin = UNKNOWN,
    ) -> bytes:
        """An entry of a LogBatch: records from index `start` on, the ending if it has one; the first records of a log
        say what computes them, all say it where they are not exact.
        """
        parts = [self._head, _START, _varint(start), _RECORDS, _varint(len(records)), records]
        if ending is not None:
            data = ending.SerializeToString()
            parts += (_ENDING, _varint(len(data)), data)
        if not start:
            for key, text in ((_CONTENT, origin.content), (_NUMERICS, origin.numerics)):
                if text:
                    parts += (key, _varint(len(text)), text.encode())
        if not origin.is_exact:
            parts.append(_INEXACT)
        body = b"".join(parts)
        return _EVENTS + _varint(len(body)) + body


@lru_cache(maxsize=1 << 16)
def token_middle(start: int) -> bytes:
    """The start and the header of one record of four bytes; always as long, so that lengths need no counting."""
    padded = bytes(
        (start >> shift) & 0x7F | (0x80 if shift < 21 else 0) for shift in (0, 7, 14, 21)
    )
    return _START + padded + _RECORDS + b"\x04"


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
