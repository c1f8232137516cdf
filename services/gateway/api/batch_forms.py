"""What the APIs that have batches give of themselves: how a line asks for something, and how its result is written."""

import asyncio
from dataclasses import dataclass
from typing import Protocol

from services.gateway.http.inner_calls import InnerReply
from shared.errors import ServingError
from shared.queue.stores.batch_store import StoredBatch, kind_of


@dataclass(frozen=True, slots=True)
class LineRequest:
    """What a line asks for: a body for the endpoint of its batch."""

    custom_id: str
    body: bytes


@dataclass(frozen=True, slots=True)
class LineName:
    """Which line it is; `custom_id` is what it calls itself, None where that cannot be read."""

    batch_id: str
    number: int
    custom_id: str | None


class BatchForm(Protocol):
    """The form of one API's lines and results. A result is one line, without its end."""

    def read(self, line: bytes, batch: StoredBatch) -> LineRequest:
        """Raises InvalidRequest naming the field."""

    def answered(self, name: LineName, reply: InnerReply) -> bytes:
        """The result of a request that was answered, also by an error."""

    def unanswered(self, name: LineName, error: ServingError) -> bytes:
        """The result of a line without an answer."""

    def left(self, name: LineName, outcome: str) -> bytes:
        """The result of a line that was not answered before its batch ended, as `outcome` says."""


class BatchForms:
    """Forms by the kind of a batch, which its id begins with."""

    def __init__(self) -> None:
        self._forms: dict[str, BatchForm] = {}
        # Set where a batch has been made, or is to end: who leads batches looks at once.
        self.woken = asyncio.Event()

    def add(self, kind: str, form: BatchForm) -> None:
        """Batches of a kind have this form."""
        self._forms[kind] = form

    def of(self, batch_id: str) -> BatchForm:
        """The form of a batch."""
        return self._forms[kind_of(batch_id)]


# What many readers of text, Python's among them, take for the end of a line too, and how JSON writes it otherwise.
_LINE_ENDS = {
    character.encode(): f"\\u{ord(character):04x}".encode()
    for character in ("\u0085", "\u2028", "\u2029")
}


def in_one_line(result: bytes) -> bytes:
    """JSON without what readers take for the end of a line."""
    result = result.replace(b"\r", b" ").replace(b"\n", b" ")  # those between values
    for written, escaped in _LINE_ENDS.items():
        result = result.replace(written, escaped)
    return result
