"""What an API says of its responses: its errors, where its callers' keys stand, and what its streams have in common."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.gateway.admission.api_keys import KeyHeader
from shared.errors import ServingError

JSON = b"application/json"


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error as a whole response."""

    status: int
    body: bytes
    media_type: bytes = JSON


class ErrorForm(Protocol):
    """The form of an API's errors."""

    @property
    def key_headers(self) -> Sequence[KeyHeader]:
        """The headers in which its callers may send their key."""

    def error(self, error: ServingError) -> ErrorReply:
        """An error as a whole response, before or without a stream."""


class StreamForm(Protocol):
    """The form of a stream, beside what it says of an answer."""

    @property
    def media_type(self) -> bytes:
        """Its Content-Type."""

    @property
    def ping(self) -> bytes:
        """What tells client and proxies in a silence that the stream goes on; empty where the form has none."""

    @property
    def after_ping(self) -> bytes:
        """What the frame behind a ping begins with; mostly empty."""

    def failure(self, error: ServingError) -> bytes:
        """The last frames of a stream that an error ends."""
