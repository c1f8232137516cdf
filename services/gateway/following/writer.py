"""What writes an answer in the form of one API."""

from collections.abc import Iterator
from typing import Protocol, TypeVar

from services.gateway.following.answer import Piece

_Part = TypeVar("_Part", covariant=True)
_Frames = TypeVar("_Frames", covariant=True)


class Writer(Protocol[_Part, _Frames]):
    """One answer as frames of one form: bytes over HTTP, messages over gRPC. It does no I/O: what it gives depends on
    the answer's pieces and on where its client is, so every gateway goes on with a stream of any other.
    """

    def accepted(self) -> _Frames:
        """What is due at once: the request is in the queue."""

    def first(self) -> Iterator[_Part]:
        """What comes before any token, due once the prompt's scores are known; in parts, between which others have
        their turn.
        """

    def piece(self, piece: Piece) -> _Frames:
        """The frames of one piece."""

    def end(self) -> _Frames:
        """What comes behind the last piece."""
