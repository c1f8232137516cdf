"""Errors of requests as such, beside those that all services have (`shared/errors.py`)."""

from shared.errors import Expired, InvalidRequest, NotFound


class BodyTooLarge(InvalidRequest):
    """More bytes than the limit."""

    http_status = 413


class WrongMediaType(InvalidRequest):
    """A body that is not JSON."""

    http_status = 415


class MethodNotAllowed(InvalidRequest):
    """The route exists, for another method; `allow` in the metadata says which."""

    http_status = 405


class HeadTooLarge(InvalidRequest):
    """More or longer headers than the limit."""

    http_status = 431


class InvalidHttp(InvalidRequest):
    """A request that the HTTP parser cannot read, or that breaks a limit."""


class TooSlow(Expired):
    """The client took too long to send its request."""

    http_status = 408


class Forbidden(InvalidRequest):
    """The caller may not do this, whatever its key."""

    http_status = 403


class NoRoute(NotFound):
    """No such path."""
