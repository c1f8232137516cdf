"""The errors that services return.

    ServingError(reason, message, **metadata)
    ├─ InvalidRequest     INVALID_ARGUMENT     400   the caller must change the request
    │  └─ TooLarge        OUT_OF_RANGE         413   larger than this server can ever hold
    ├─ Unauthenticated    UNAUTHENTICATED      401   no API key, or a wrong one
    ├─ NotFound           NOT_FOUND            404
    ├─ Conflict           ALREADY_EXISTS       409   the same key with another body
    ├─ Overloaded         RESOURCE_EXHAUSTED   429   retry after a delay
    ├─ Precondition       FAILED_PRECONDITION  400   the state forbids it: an old lease, a broken promise
    ├─ Unavailable        UNAVAILABLE          503   retry elsewhere: Redis, a peer or an artifact is gone
    ├─ Expired            DEADLINE_EXCEEDED    504
    ├─ Cancelled          CANCELLED            499   the client went away
    ├─ Superseded         ABORTED              409   a newer owner took over
    └─ Internal           INTERNAL             500   a fault of the server; anything unlisted becomes this

`reason` is a stable upper-case word for programs, the message a sentence for people: what went wrong, which field or
limit, what to do. `shared/net/rpc/errors.py` maps the tree to gRPC and back, the gateway maps it to OpenAI's JSON.

Messages and metadata are cut here, and only here: whatever they quote, what leaves a process is short.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import grpc

from shared.text.cutting import cut

if TYPE_CHECKING:
    from tessera.common.v1.ending_pb2 import Failure

_LONGEST_MESSAGE = 2_000
_LONGEST_DETAIL = 300


class ServingError(Exception):
    """The base class: raised in one service, raised again in its callers."""

    status: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    http_status: ClassVar[int] = 500

    def __init__(self, reason: str, message: str, **metadata: str) -> None:
        self.reason = reason
        self.message = cut(message, _LONGEST_MESSAGE)
        self.metadata = {name: cut(text, _LONGEST_DETAIL) for name, text in metadata.items()}
        super().__init__(self.message)

    @property
    def unquoting(self) -> str:
        """The error for logs, without the message, which may quote what a client sent."""
        return self.reason

    def to_failure(self) -> Failure:
        """The error as data, for the token log and step results."""
        # Only here: `tessera doctor` and every `--help` work before the protos are compiled.
        from tessera.common.v1.ending_pb2 import Failure

        return Failure(
            code=status_number(self.status),
            reason=self.reason,
            message=self.message,
            metadata=self.metadata,
        )


class InvalidRequest(ServingError):
    """The caller must change the request; `field` in the metadata names what."""

    status = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 400


class TooLarge(InvalidRequest):
    """More than this server can hold, however little else it has to do."""

    status = grpc.StatusCode.OUT_OF_RANGE
    http_status = 413


class Unauthenticated(ServingError):
    """No API key, or a wrong one."""

    status = grpc.StatusCode.UNAUTHENTICATED
    http_status = 401


class NotFound(ServingError):
    """Nothing by that name."""

    status = grpc.StatusCode.NOT_FOUND
    http_status = 404


class Conflict(ServingError):
    """The same idempotency key with another body."""

    status = grpc.StatusCode.ALREADY_EXISTS
    http_status = 409


class Overloaded(ServingError):
    """A limit is reached; `retry_after_s` in the metadata gives the seconds to wait."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = 429


class Precondition(ServingError):
    """The state forbids it: an old lease, an output unlike its promise."""

    status = grpc.StatusCode.FAILED_PRECONDITION
    http_status = 400


class Unavailable(ServingError):
    """Something this depends on is away; the same request may succeed elsewhere or later."""

    status = grpc.StatusCode.UNAVAILABLE
    http_status = 503


class Expired(ServingError):
    """The time allowed is over."""

    status = grpc.StatusCode.DEADLINE_EXCEEDED
    http_status = 504


class Cancelled(ServingError):
    """The client went away."""

    status = grpc.StatusCode.CANCELLED
    http_status = 499


class Superseded(ServingError):
    """A newer owner took over; stop."""

    status = grpc.StatusCode.ABORTED
    http_status = 409


class Internal(ServingError):
    """A fault of the server."""


_CLASSES: tuple[type[ServingError], ...] = (
    InvalidRequest,
    TooLarge,
    Unauthenticated,
    NotFound,
    Conflict,
    Overloaded,
    Precondition,
    Unavailable,
    Expired,
    Cancelled,
    Superseded,
    Internal,
)


def status_number(status: grpc.StatusCode) -> int:
    """The number of a gRPC status code."""
    number: int = status.value[0]
    return number


_BY_NUMBER = {status_number(cls.status): cls for cls in _CLASSES}


def from_failure(failure: Failure) -> ServingError:
    """The error that `to_failure` wrote down, as the same class."""
    return from_status_number(failure.code, failure.reason, failure.message, dict(failure.metadata))


def from_status_number(
    number: int, reason: str, message: str, metadata: dict[str, str]
) -> ServingError:
    """Builds the error of a gRPC status; a status without a class of its own is `Internal`."""
    return _BY_NUMBER.get(number, Internal)(reason, message, **metadata)
