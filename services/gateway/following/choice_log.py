"""One token log as far as a gateway has read it: repeated records are trimmed, missing ones are noticed."""

from dataclasses import dataclass
from typing import NamedTuple

from services.gateway.endings import COMPLETED
from shared.environment import monotonic
from shared.queue import token_log
from tessera.common.v1.ending_pb2 import Ending
from tessera.scheduler.v1.queue_pb2 import RequestSpec

TOKENS_ONLY = token_log.stride(None)
_VALUE_BYTES = token_log.stride(1) - token_log.stride(0)


@dataclass(frozen=True, slots=True)
class LogLayout:
    """The logs of a request: how many choices, and the bytes of their records; how many records the
    prompt's log has and their bytes, 0 if there is no such log.
    """

    choices: int = 1
    stride: int = TOKENS_ONLY
    prompt_records: int = 0
    prompt_stride: int = 0

    @classmethod
    def of(cls, head: RequestSpec, prompt_tokens: int) -> "LogLayout":
        """The logs that a request has, by its head."""
        sampling = head.sampling
        logprobs = sampling.logprobs if sampling.HasField("logprobs") else None
        if not sampling.HasField("prompt_logprobs"):
            return cls(sampling.n, token_log.stride(logprobs, head.pooling.width))
        prompt_stride = token_log.stride(sampling.prompt_logprobs)
        return cls(sampling.n, token_log.stride(logprobs), prompt_tokens - 1, prompt_stride)


class ChoiceDelta(NamedTuple):
    """What was added to a choice's log. `records` only where they hold more than tokens."""

    choice: int
    tokens: list[int]
    records: bytes
    ending: Ending | None


class ChoiceLog:
    """The tokens and the ending of one choice, as far as they are known here."""

    def __init__(self, choice: int, stride: int, expected: int | None = None) -> None:
        """`expected` is the number of records of a log that has no ending."""
        self.choice = choice
        self.stride = stride
        self.tokens: list[int] = []
        self.ending: Ending | None = None
        self.heard_at = monotonic()
        self.needs_read = False
        self.diverged = False
        self._expected = expected
        self._records = bytearray()
        self._given = 0
        # After Redis was away: its log has to be compared with what is known before more is taken.
        self._doubted = False

    @property
    def complete(self) -> bool:
        """Whether nothing more will come."""
        if self._expected is None:
            return self.ending is not None
        return len(self.tokens) >= self._expected

    @property
    def broken_off(self) -> bool:
        """Whether it ended with an error or was cancelled."""
        return self.ending is not None and self.ending.reason not in COMPLETED

    @property
    def cursor(self) -> int:
        """The index to read from."""
        return 0 if self._doubted else len(self.tokens)

    @property
    def records(self) -> bytes:
        """All known records, as they are stored in Redis."""
        if self.stride == TOKENS_ONLY:
            return token_log.encode_tokens(self.tokens)
        return bytes(self._records)

    def doubt(self) -> None:
        """Called when Redis was away: the log is read and compared once more."""
        self._doubted = bool(self.tokens)
        self.needs_read = True

    def offer(self, start: int, records: bytes, ending: Ending | None, *, whole: bool) -> bool:
        """Takes records from index `start` on; returns True if they add something. `whole`: nothing can
        be missing before an ending.
        """
        if self.ending is not None:  # two reads were in flight: an ending counts once
            return False
        if len(records) == TOKENS_ONLY == self.stride:  # nearly always
            fresh = [int.from_bytes(records, "little", signed=True)]
        else:
            fresh = token_log.decode_tokens(records, self.stride)
        known = len(self.tokens)
        end = start + len(fresh)
        if self._doubted and not self._is_settled(start, fresh, ending, whole):
            return self.diverged
        if start > known:
            self.needs_read = True
            return False
        if start < known and fresh[: known - start] != self.tokens[start:end]:
            self.diverged = True
            return True
        if end > known:
            self._take_in(fresh, records, known - start)
        if ending is not None:
            self._end(ending, end, known, whole)
        if end > known or self.ending is not None or self.diverged:
            self.heard_at = monotonic()
            return True
        return False

    def _end(self, ending: Ending, end: int, known: int, whole: bool) -> None:
        """Takes the ending of a log of which `end` records were reported and `known` were known before."""
        if whole and end < known and ending.reason in COMPLETED:
            self.diverged = True
        elif whole or end == len(self.tokens) > 0:
            self.ending = ending
        else:
            # An event of an ending without tokens does not say how long the log is: read it once
            # more.
            self.needs_read = True

    def _is_settled(self, start: int, fresh: list[int], ending: Ending | None, whole: bool) -> bool:
        """Whether the records settle the comparison: the log from its beginning, at least as long as it was."""
        if start or not whole:
            self.needs_read = True
            return False
        if ending is None and len(fresh) < len(self.tokens):  # it grows again
            self.diverged = fresh != self.tokens[: len(fresh)]
            return False
        self._doubted = False
        return True

    @property
    def waiting(self) -> int:
        """Tokens that have not been taken."""
        return len(self.tokens) - self._given

    @property
    def values_a_token(self) -> int:
        """Log-probabilities of each token; 1 where there are none."""
        return max(1, self.stride // _VALUE_BYTES)

    def take(self, most: int | None = None) -> ChoiceDelta:
        """At most so many tokens of those since the last call; with the last of all, the ending."""
        given = self._given
        fresh = self.tokens[given:] if most is None else self.tokens[given : given + most]
        self._given = end = given + len(fresh)
        ending = self.ending if end == len(self.tokens) else None
        return ChoiceDelta(self.choice, fresh, self.records_of(given, end), ending)

    def records_of(self, start: int, end: int) -> bytes:
        """The records of some tokens, where they hold more than tokens."""
        if not self._records:
            return b""
        with memoryview(self._records) as view:
            return bytes(view[start * self.stride : end * self.stride])

    def _take_in(self, fresh: list[int], records: bytes, overlap: int) -> None:
        self.tokens += fresh[overlap:] if overlap else fresh
        if self.stride != TOKENS_ONLY:
            self._records += records[overlap * self.stride : len(fresh) * self.stride]
