"""Errors of offline use."""

from shared.client import ClientError, Refused

_OTHERS_FAULT = (408, 429)  # of the 4xx


class RequestRefused(ValueError):
    """A request that cannot be answered as it is; the message names the field."""


class EngineFailed(RuntimeError):
    """The services could not be started, or an answer could not be completed."""


def raised(error: ClientError) -> Exception:
    """What a caller sees of an error of the client."""
    is_callers = isinstance(error, Refused) and 400 <= error.status < 500
    if isinstance(error, Refused) and is_callers and error.status not in _OTHERS_FAULT:
        return RequestRefused(error.reason)
    return EngineFailed(str(error))
