"""What the simulated device refuses."""


class Refused(RuntimeError):
    """A call that the documented limits of a kernel do not allow."""


def require(holds: bool, what: str) -> None:
    """Raises Refused unless it holds."""
    if not holds:
        raise Refused(what)
