"""Errors that the client raises."""


class ClientError(Exception):
    """No answer, or no complete one. The base class of all errors here; the message is for users."""


class Refused(ClientError):
    """The server refuses the request, and would again: HTTP status and its message."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"{reason} (HTTP {status})")
        self.status = status
        self.reason = reason


class Failed(ClientError):
    """The answer ended with an error after it had begun; `code` is the server's code of the error."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class GaveUp(ClientError):
    """No gateway continued the answer for as long as a request is kept."""
