"""`python -m tests.ascend.breaks [part of a reason]`: breaks the code in each way, runs the tests that should notice it,
and lists the ways that none of them notices; the status is 1 if there is one.

In the environment of `tests/ascend/environment.py`. As many run at once as there are processors, each in a process that
has its imports behind it (`tests/ascend/prepared.py`).
"""

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tests.ascend.breaks.entries import BREAKS
from tests.ascend.breaks.fault import ROOT, Break
from tests.ascend.prepared import BREAK, Prepared

_NOTICED = 1  # pytest's status where a test fails; others are errors of the entry
_LONGEST_S = 240.0
_PYTEST = ("-q", "-x", "-p", "no:cacheprovider", "-m", "not compose")
# What the process has imported already pytest does not rewrite.
_QUIET = ("-W", "ignore::pytest.PytestAssertRewriteWarning")


@dataclass(frozen=True)
class Outcome:
    """What became of a break: nothing is wrong where `problem` is empty."""

    fault: Break
    seconds: float
    problem: str
    output: str


def run(fault: Break) -> Outcome:
    """Breaks the code and runs the tests."""
    began = time.monotonic()
    tests = [f"tests/ascend/{test}" for test in fault.tests]
    code = f"import pytest, sys\nsys.exit(int(pytest.main({[*_PYTEST, *_QUIET, *tests]!r})))"
    environment = {**os.environ, BREAK: fault.reason}
    with tempfile.TemporaryFile() as file:
        try:
            fault.broken((ROOT / fault.file).read_text(encoding="utf-8"))
            status = Prepared(code, environment, file.fileno()).wait(_LONGEST_S)
            problem = _problem(status)
        except (ValueError, TimeoutError) as error:
            problem = str(error) or f"no answer within {_LONGEST_S:.0f} seconds"
        file.seek(0)
        output = file.read().decode(errors="replace")
    return Outcome(fault, time.monotonic() - began, problem, output)


def _problem(status: int) -> str:
    if status == _NOTICED:
        return ""
    if status == 0:
        return "survives: its tests pass"
    return f"its tests do not run (status {status})"


def main(arguments: Sequence[str]) -> int:
    """Runs those whose reason has the text; prints a line for each as it ends."""
    wanted = " ".join(arguments)
    chosen = [fault for fault in BREAKS if wanted in fault.reason]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes = []
        for outcome in pool.map(run, chosen):
            outcomes.append(outcome)
            mark = "noticed" if not outcome.problem else "NOT NOTICED"
            print(f"{mark:11} {outcome.seconds:6.1f} s  {outcome.fault.reason}", flush=True)
    left = [outcome for outcome in outcomes if outcome.problem]
    for outcome in left:
        print(f"\n{outcome.fault.reason}: {outcome.problem}\n{outcome.output[-3000:]}")
    print(f"\n{len(chosen)} ways to break the code, {len(left)} not noticed")
    return int(bool(left) or not chosen)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
