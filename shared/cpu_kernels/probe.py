"""Finds out, once for a host, which libraries of CPU kernels can be used and how fast they are.

Nothing but the standard library is needed here.
"""

from collections.abc import Sequence
from pathlib import Path

from shared.cpu_kernels import compiling, trial
from shared.cpu_kernels.findings import FindingsFile
from shared.cpu_kernels.instruction_sets import InstructionSet

# The one set whose use a system has to permit, and which some show without giving it.
_NEEDS_PROOF = "amx"


class Probe:
    """Of `sets`: what is kept is read, what is missing is found out. `may_compile`: what is not compiled is, first.

    `warnings`: what went wrong but for single sets.
    """

    def __init__(
        self, sets: Sequence[InstructionSet], file: FindingsFile, may_compile: bool
    ) -> None:
        self._sets = sets
        self._file = file
        self._may_compile = may_compile and compiling.compiler() is not None
        self._libraries = self._find()
        self._findings = file.read()
        self.warnings: list[str] = []

    def run(self, timed: bool) -> None:
        """Returns when the sets are compiled, asked and, with `timed`, if there are several, timed.

        Other processes that find out the same wait meanwhile.
        """
        if self._is_settled(timed) and not (self._may_compile and self._missing()):
            return
        with self._file.lock():
            failed = self._compile() if self._may_compile else {}
            self._findings = self._file.read()  # as another process has left it
            is_settled = self._is_settled(timed)
            if not is_settled:
                self._ask()
            if not is_settled and timed and len(self.usable()) > 1:
                self._time()
            if self._note_uncompiled(failed) or not is_settled:
                self._keep()

    def usable(self) -> list[InstructionSet]:
        """Those with a library that may be used, in the order of `sets`."""
        problems = self._findings.problems
        return [
            known
            for known in self._sets
            if known.name in self._libraries and not problems[known.name]
        ]

    def problems(self) -> dict[str, str]:
        """Why the others cannot be used, by name."""
        found = {
            name: self._findings.uncompiled.get(name, "it is not compiled")
            for name in self._missing()
        }
        for name in self._libraries:
            if problem := self._findings.problems[name]:
                found[name] = problem
        return found

    def times(self) -> dict[str, trial.Times]:
        """Of those that can be used, by name; some are missing where there was no trial."""
        names = [known.name for known in self.usable()]
        return {name: self._findings.times[name] for name in names if name in self._findings.times}

    def _is_settled(self, timed: bool) -> bool:
        if not self._findings.problems.keys() >= self._libraries.keys():
            return False
        usable = self.usable()
        return not timed or len(usable) < 2 or len(self.times()) == len(usable)

    def _ask(self) -> None:
        problems = self._findings.problems
        unasked = {name: path for name, path in self._libraries.items() if name not in problems}
        try:
            attempts = trial.admit(unasked) if unasked else {}
        except OSError as error:
            # What needs no proof is used as ever.
            attempts = {
                name: trial.Attempt(str(error) if name == _NEEDS_PROOF else "", lasting=False)
                for name in unasked
            }
        self._note(attempts)

    def _time(self) -> None:
        names = [known.name for known in self.usable()]
        try:
            attempts = trial.measure({name: self._libraries[name] for name in names})
        except OSError as error:
            self.warnings.append(f"no trial of CPU kernels: {error}")
            return
        self._note(attempts)
        self._findings.times |= {
            name: attempt.times for name, attempt in attempts.items() if attempt.times
        }

    def _note(self, attempts: dict[str, trial.Attempt]) -> None:
        for name, attempt in attempts.items():
            self._findings.problems[name] = attempt.problem
            if not attempt.lasting:
                self._findings.passing.add(name)

    def _compile(self) -> dict[str, str]:
        """Why some cannot be, by name."""
        errors = compiling.compile_missing(self._sets)
        self._libraries = self._find()
        return {known.name: compiling.reason(error) for known, error in errors.items()}

    def _note_uncompiled(self, failed: dict[str, str]) -> bool:
        """Whether that is news: processes that do not compile go by it."""
        known = self._findings.uncompiled
        left = {name: why for name, why in (known | failed).items() if name not in self._libraries}
        self._findings.uncompiled = left
        return left != known

    def _keep(self) -> None:
        if self._file.write(self._findings) is None:
            where = " or ".join(map(str, self._file.folders))
            self.warnings.append(
                f"each process tries the CPU kernels anew: cannot write to {where}"
            )

    def _find(self) -> dict[str, Path]:
        return {known.name: path for known in self._sets if (path := compiling.find(known))}

    def _missing(self) -> list[str]:
        return [known.name for known in self._sets if known.name not in self._libraries]
