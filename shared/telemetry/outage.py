"""What cannot be reached for a while: said once when that begins and once when it is over, not at each try."""

from typing import Any


class Outage:
    """One thing that may be away, and whoever notices."""

    def __init__(self, log: Any, begins: str, ends: str = "") -> None:
        """`log` is a logger of structlog; `begins` and `ends` are the lines' events, `ends` empty for no line."""
        self._log = log
        self._begins = begins
        self._ends = ends
        self._noticed: set[object] = set()

    def note(self, error: str, by: object = None) -> None:
        """`by` could not reach it now, because of `error`: a warning, unless somebody could not before."""
        if not self._noticed:
            self._log.warning(self._begins, error=error)
        self._noticed.add(by)

    def over(self, by: object = None) -> None:
        """`by` has reached it."""
        if by in self._noticed:
            self._noticed.remove(by)
            if self._ends and not self._noticed:
                self._log.info(self._ends)

    def leave(self, by: object = None) -> None:
        """`by` tries no more."""
        self._noticed.discard(by)
