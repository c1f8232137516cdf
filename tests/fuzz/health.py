"""The processes of a fuzzed system: who has died, and what they take."""

import contextlib

import psutil

from services.launcher.supervise.process_table import read_process_table
from tests.fuzz.verdict import Broken
from tests.support.processes.system import System

_MIB = 1 << 20
# Of tracebacks, and of the lines of each.
_MOST_SHOWN = 3
_SHOWN = 60


class Health:
    """Compares with the moment in which it is made."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._state = system.folder / "state"
        self._before = self._resident()

    def check(self) -> None:
        """Raises Broken, naming who has died since the start."""
        entries = read_process_table(self._state).entries.values()
        dead = [f"{entry.name} ({entry.crashes} times)" for entry in entries if entry.crashes]
        if dead:
            raise Broken(f"ended and was started again: {', '.join(dead)}\n{self._tail()}")

    def memory(self) -> str:
        """Resident memory of each process in MiB, at the start and now."""
        now = self._resident()
        return "\n".join(
            f"  {name:<18}{self._before.get(name, 0):>6} -> {now[name]:>6} MiB" for name in now
        )

    def tracebacks(self) -> list[str]:
        """Those in the log, each with the lines behind it: nothing that comes from outside is worth one."""
        lines = self._system.log.splitlines()
        begins = [at for at, line in enumerate(lines) if "Traceback (most recent" in line]
        return ["\n".join(lines[at : at + _SHOWN]) for at in begins[:_MOST_SHOWN]]

    def _resident(self) -> dict[str, int]:
        found = {}
        for entry in read_process_table(self._state).entries.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                if entry.pid:
                    found[entry.name] = psutil.Process(entry.pid).memory_info().rss // _MIB
        return found

    def _tail(self) -> str:
        return "\n".join(self._system.log.splitlines()[-30:])
