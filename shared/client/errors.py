"""What a client cannot mend by itself."""


class ClientError(Exception):
    """No answer, or no complete one. Every error of this package is one; its text is a sentence for people."""


class Refused(ClientError):
    """The server will not answer this request, whoever asks again: HTTP status and its own words."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"{reason} (HTTP {status})")
        self.status = status
        self.reason = reason


class Failed(ClientError):
    """The answer ended with an error after it had begun; `code` is the server's name for it."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class GaveUp(ClientError):
    """No gateway went on with the answer for as long as a request is kept."""
