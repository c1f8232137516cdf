"""What was found out about the libraries of CPU kernels on this host, kept in a file for all its processes.

The file's name holds a digest of what the findings depend on: the processor and its microcode, Linux, the sources of
the libraries, the form of the file. One that cannot be read is none: it is all found out again. Nothing but the
standard library is needed here.
"""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import platform
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shared.cpu_kernels import compiling, instruction_sets
from shared.cpu_kernels.instruction_sets import InstructionSet
from shared.cpu_kernels.trial import WEIGHTS, Times

_FORM = 1
_MOST_FILES = 16
_LOCK = "trial.lock"


@dataclass
class Findings:
    """By name of the instruction set: `problems`, why it must not be used, empty if it may; `times` of those tried;
    `uncompiled`, why there is no library of it. What was found of those in `passing` holds for this process, and is not
    kept."""

    problems: dict[str, str] = field(default_factory=dict)
    times: dict[str, Times] = field(default_factory=dict)
    uncompiled: dict[str, str] = field(default_factory=dict)
    passing: set[str] = field(default_factory=set)


class FindingsFile:
    """The findings of this host about `sets`, in the first folder that has them; safe for several processes at once."""

    def __init__(self, sets: Sequence[InstructionSet], folders: Sequence[Path]) -> None:
        """`folders`: where the file may lie; it is written into the first in which files can be made."""
        here = instruction_sets.processor()
        parts = (
            *(str(_FORM), platform.machine(), platform.release()),
            *(*here.name, *sorted(here.flags)),
            *map(compiling.file_name, sets),
        )
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
        self._name = f"trial-{digest}.json"
        self.folders = folders

    def read(self) -> Findings:
        """What is kept; nothing of a file that is damaged."""
        for folder in self.folders:
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
                return _parse((folder / self._name).read_text(encoding="utf-8"))
        return Findings()

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Waits for other processes of this host that are finding out the same. Without a folder nobody waits."""
        folder = self._writable()
        lock = None
        if folder is not None:
            with contextlib.suppress(OSError):
                lock = os.open(
                    folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666
                )
        try:
            if lock is not None:
                with contextlib.suppress(OSError):  # a file system without locks
                    fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            if lock is not None:
                os.close(lock)

    def write(self, findings: Findings) -> Path | None:
        """Keeps them, whole or not at all. Returns the file; None where there can be none."""
        folder = self._writable()
        if folder is None:
            return None
        problems = {
            name: problem
            for name, problem in findings.problems.items()
            if name not in findings.passing
        }
        kept = {
            "problems": problems,
            "times": findings.times,
            "uncompiled": findings.uncompiled,
        }
        content = json.dumps(kept, indent=1)
        try:
            descriptor, made = tempfile.mkstemp(dir=folder, prefix=".", suffix=".part")
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    file.write(content + "\n")
                    os.fchmod(file.fileno(), 0o644)
                Path(made).replace(folder / self._name)
            except BaseException:
                Path(made).unlink(missing_ok=True)
                raise
            _forget_oldest(folder)
        except OSError:
            return None
        return folder / self._name

    def _writable(self) -> Path | None:
        return next((folder for folder in self.folders if compiling.is_writable(folder)), None)


def _parse(text: str) -> Findings:
    """Raises one of the errors of a damaged file."""
    kept = json.loads(text)
    problems, uncompiled = (
        {str(name): str(problem) for name, problem in kept[each].items()}
        for each in ("problems", "uncompiled")
    )
    times: dict[str, Times] = {
        str(name): {rows: float(each[str(rows)]) for rows in WEIGHTS}
        for name, each in kept["times"].items()
    }
    if not all(0 < each < math.inf for found in times.values() for each in found.values()):
        raise ValueError("a time that none takes")
    return Findings(problems, times, uncompiled)


def _forget_oldest(folder: Path) -> None:
    files = sorted(folder.glob("trial-*.json"), key=lambda file: file.stat().st_mtime_ns)
    for file in files[:-_MOST_FILES]:
        file.unlink(missing_ok=True)
