"""`python -m tests.ascend.breaks [part of a reason]`: breaks the code in each way, runs the tests that should notice
it, and lists the ways that none of them notices; the status is 1 if there is one.

In the environment of `tests/ascend/environment.py`. As many run at once as there are processors, each in a process that
has its imports behind it (`tests/ascend/prepared.py`).
"""

import os
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tests.ascend.breaks.entries import BREAKS
from tests.ascend.breaks.fault import ROOT, Break
from tests.ascend.prepared import BREAK, Prepared

_NOTICED = 1  # pytest's status where a test fails; others are errors of the entry
_LATE, _LONGEST_S = -2, 600.0
_SHOWN = 3000  # characters of what is said last
_PYTEST = ("-q", "-x", "-p", "no:cacheprovider", "-m", "not compose")
# What the process has imported already pytest does not rewrite.
_QUIET = ("-W", "ignore::pytest.PytestAssertRewriteWarning")


@dataclass(frozen=True)
class Outcome:
    """What became of tests: nothing is wrong where `problem` is empty."""

    name: str
    seconds: float
    problem: str
    output: str


def unbroken(tests: tuple[str, ...]) -> Outcome:
    """Of tests of the code as it is: in the same kind of process they have to pass."""
    status, seconds, output = _run(tests, "")
    problem = "" if status == 0 else f"fail without a break (status {status})"
    return Outcome(", ".join(tests), seconds, problem, output)


def broken(fault: Break) -> Outcome:
    """Of the tests of a break: one has to fail."""
    try:
        fault.broken((ROOT / fault.file).read_text(encoding="utf-8"))
    except ValueError as error:
        return Outcome(fault.reason, 0.0, str(error), "")
    status, seconds, output = _run(fault.tests, fault.reason)
    problem = {_NOTICED: "", 0: "survives: its tests pass"}.get(
        status, f"its tests do not run (status {status})"
    )
    return Outcome(fault.reason, seconds, problem, output)


def _run(tests: tuple[str, ...], reason: str) -> tuple[int, float, str]:
    """The status of pytest, how long it took, and what it said."""
    began = time.monotonic()
    arguments = [*_PYTEST, *_QUIET, *(f"tests/ascend/{test}" for test in tests)]
    code = f"import pytest, sys\nsys.exit(int(pytest.main({arguments!r})))"
    with tempfile.TemporaryFile() as file:
        program = Prepared(code, {**os.environ, BREAK: reason}, file.fileno())
        try:
            status = program.wait(_LONGEST_S)
        except TimeoutError:
            status = _LATE
        file.seek(0)
        return status, time.monotonic() - began, file.read().decode(errors="replace")


def main(arguments: Sequence[str]) -> int:
    """Runs those whose reason has the text, and before them their tests; prints a line for each."""
    wanted = " ".join(arguments)
    chosen = [fault for fault in BREAKS if wanted in fault.reason]
    wrong: list[Outcome] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs: list[tuple[str, Iterable[Outcome]]] = [
            ("passes", pool.map(unbroken, dict.fromkeys(fault.tests for fault in chosen))),
            ("noticed", pool.map(broken, chosen)),
        ]
        for good, outcomes in jobs:
            for outcome in outcomes:
                mark = "WRONG" if outcome.problem else good
                print(f"{mark:8}{outcome.seconds:6.1f} s  {outcome.name}", flush=True)
                wrong += [outcome] if outcome.problem else []
    for outcome in wrong:
        print(f"\n{outcome.name}: {outcome.problem}\n{outcome.output[-_SHOWN:]}")
    print(f"\n{len(chosen)} ways to break the code, {len(wrong)} not noticed or not tried")
    return int(bool(wrong) or not chosen)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
