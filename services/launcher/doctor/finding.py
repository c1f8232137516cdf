"""One line of the report of `tessera doctor`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line of the report; `remedy` is a command, given where something is wrong and `found` does not name one."""

    what: str
    found: str
    remedy: str = ""
    needed: bool = True
    is_fault: bool = False

    @property
    def mark(self) -> str:
        """ok, missing (needed) or note (not needed by everybody)."""
        if not self.remedy and not self.is_fault:
            return "ok"
        return "missing" if self.needed else "note"
