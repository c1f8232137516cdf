"""What one API consists of: its routes, its form of errors, and its form of replies."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from services.gateway.admission.caller import Caller
from services.gateway.following.answer import Answer, Piece
from services.gateway.http.exchange import Exchange
from shared.errors import ServingError

Handler = Callable[[Exchange, Caller], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path. In a path `*` as its third part stands for any one part, `**` at its end for all that
    follows.
    """

    method: str
    path: str
    handler: Handler
    # What its bodies are decoded to, and what its JSON replies are; None where they have no Struct.
    body: type[msgspec.Struct] | None = None
    reply: type[msgspec.Struct] | None = None
    # Whether callers need a key where there are keys.
    needs_key: bool = True
    # Whether it asks for tokens: the log has a line for its end, however it ends.
    generates: bool = False
    # Whether probes call it by address, whatever names the server has.
    is_probe: bool = False


class Endpoint(Protocol):
    """One API."""

    @property
    def routes(self) -> Sequence[Route]:
        """All its routes."""

    def error(self, error: ServingError) -> bytes:
        """An error as JSON in the API's form, for whole responses and inside streams."""


class Writer(Protocol):
    """One answer as a stream of one API's form. It does no I/O: what it gives depends on the answer's pieces alone."""

    def first(self) -> Iterator[str]:
        """The events before any token, in pieces; due once the prompt's scores are known."""

    def piece(self, piece: Piece) -> bytes:
        """The events of one piece."""

    def end(self) -> bytes:
        """The events after the last piece."""


# A writer for an answer. `with_ids`: its events have ids, from which the stream can be resumed.
MakeWriter = Callable[[Answer, bool], Writer]
