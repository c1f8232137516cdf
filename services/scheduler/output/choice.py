"""One choice of a request, between the core and the token log."""

from typing import TYPE_CHECKING, Protocol

from shared.queue.log_event import LogEventWriter, Origin
from shared.queue.token_log import decode_tokens, encode_tokens, stride
from tessera.common.v1.ending_pb2 import Ending

if TYPE_CHECKING:
    from services.scheduler.core.sequence import Sequence


class Owner(Protocol):
    """The request of a choice."""

    @property
    def request_id(self) -> str: ...
    @property
    def collects(self) -> bool:
        """Whether nothing is logged before the end."""

    def origin_of(self, records: bytes) -> Origin:
        """Where records come from that are about to be logged."""


class Choice:
    """Makes the events of one log and can make them again from any index on, should Redis have lost its tail.

    Sequences carry it as their payload. While `token_prefix` is not empty, a token of theirs is logged as
    `token_prefix + token_middle(start) + token`; otherwise it takes more than that.
    """

    __slots__ = (
        "_ending",
        "_is_plain",
        "_records",
        "_stride",
        "_writer",
        "request",
        "sequence",
        "token_prefix",
    )

    def __init__(
        self,
        request: Owner,
        number: int,
        logprobs: int | None,
        log: bytes = b"",
        pooled_width: int = 0,
    ) -> None:
        """`number` is the choice's, or that of the prompt's log-probabilities; `log` what was written before;
        `logprobs` and `pooled_width`: see `stride`."""
        self.request = request
        self.sequence: Sequence | None = None  # whose tokens it logs, where it is one sequence's
        self._stride = stride(logprobs, pooled_width)
        self._writer = LogEventWriter(request.request_id, number, self._stride)
        self._records = bytearray(log[: len(log) // self._stride * self._stride])
        self._ending: Ending | None = None
        self._is_plain = self._stride == stride(None) and not request.collects
        # The first record that is written here says where it comes from: the script keeps it.
        self.token_prefix = b""

    @property
    def length(self) -> int:
        """Records so far, where they are kept here."""
        return len(self._records) // self._stride

    @property
    def ending(self) -> Ending | None:
        """How it ended, if it has."""
        return self._ending

    def known_tokens(self, log: bytes) -> list[int]:
        """Token ids of a log of this choice."""
        return decode_tokens(log, self._stride)

    def event(self, start: int, records: bytes, ending: Ending | None = None) -> bytes:
        """Records from index `start` on, and the ending. What is there already is left out by the script."""
        if self._stride > 4 or self.sequence is None:
            self._records[start * self._stride :] = records
        self._ending = ending or self._ending
        if self._is_plain:
            self.token_prefix = self._writer.token_prefix
        return self._writer.event(start, records, ending, self.request.origin_of(records))

    def records(self, length: int = 0) -> bytes:
        """All records from an index on, whether they have been written or not."""
        if self._stride > 4 or self.sequence is None:
            return bytes(self._records[length * self._stride :])
        return encode_tokens(self.sequence.output[length:])

    def again(self, length: int) -> bytes:
        """Everything from an index on, the ending if there has been one."""
        records = self.records(length)
        return self._writer.event(length, records, self._ending, self.request.origin_of(records))
