"""Small real processes to supervise."""

import sys
from collections.abc import Callable
from pathlib import Path

from services.launcher.supervise.probe import Condition
from services.launcher.supervise.process import Program
from shared.settings import child_environment

ProgramMaker = Callable[..., Program]


class FileProbe:
    """Ready while a file exists that the process writes; silent while another one does."""

    def __init__(self, ready: Path, silent: Path) -> None:
        self._ready, self._silent = ready, silent

    async def ask(self, within_s: float) -> Condition:
        if self._silent.exists():
            return Condition.SILENT
        return Condition.READY if self._ready.exists() else Condition.SILENT


def make_program(
    folder: Path, name: str, source: str = "import time; ready(); time.sleep(600)"
) -> Program:
    """A Python process that is ready once it calls `ready()`; silent while `<name>.silent` exists."""
    ready = folder / f"{name}.ready"
    prelude = f"from pathlib import Path\ndef ready(): Path({str(ready)!r}).touch()\n"
    return Program(
        name,
        [sys.executable, "-c", prelude + source],
        child_environment(),
        FileProbe(ready, folder / f"{name}.silent"),
    )
