"""Tries libraries of CPU kernels in a process of their own, and says which is the best by what was measured.

Nothing but the standard library is needed here.
"""

import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A set is as fast as another unless that one takes this many times as long.
LEAD = 1.1
# What each number of rows counts for, see `score`.
WEIGHTS = {263: 0.5, 4: 0.25, 1: 0.25}
# Why `tessera_admit` refuses.
REFUSALS = {
    1: "the system does not permit it (a container's seccomp filter, or Linux before 5.16)",
    2: "this processor adds up in another order than the kernels expect",
    3: "its tiles are those of a self-test, in plain C++",
}
_NOT_PERMITTED = 1
_LONGEST_S = 1800.0  # the process limits itself long before
_PROGRAM = Path(__file__).with_name("trial_process.py")
# Those that a library brings upon its process, whenever it is called; another may come from elsewhere.
_OWN_SIGNALS = ("SIGILL", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGTRAP", "SIGABRT", "SIGPROF")

Times = Mapping[int, float]  # seconds of a layer by its number of rows


@dataclass(frozen=True)
class Attempt:
    """What became of a library. `problem` is empty where it did what it should; `lasting`: it would do the same again;
    `times`: of a trial."""

    problem: str = ""
    lasting: bool = True
    times: Times | None = None


def admit(libraries: Mapping[str, Path]) -> dict[str, Attempt]:
    """Whether each may be used here, by its name. Raises OSError where that cannot be tried."""
    found = {}
    for name, said in _run("admit", libraries).items():
        code = said.get("value")
        if code is None:
            found[name] = _failure(said)
        else:
            found[name] = Attempt(refusal(code), lasting=code != _NOT_PERMITTED)
    return found


def refusal(code: int) -> str:
    """What a result of `tessera_admit` means; empty for 0."""
    return REFUSALS.get(code, f"its own test says {code}") if code else ""


def measure(libraries: Mapping[str, Path]) -> dict[str, Attempt]:
    """Seconds of each by rows, one thread. Takes less than a second. Raises OSError where that cannot be tried."""
    found = {}
    for name, said in _run("measure", libraries).items():
        times = said.get("value")
        if times is None:
            found[name] = _failure(said)
        else:
            found[name] = Attempt(times={int(rows): each for rows, each in times.items()})
    return found


def score(times: Times) -> float:
    """Seconds as one figure: the weighted geometric mean, in which twice as fast counts alike at any number of rows.

    Half goes to prompts (263 rows), half to tokens, of one stream and of four in equal parts: neither the time to the
    first token nor that of the tokens after it is bought with more of the other.
    """
    return math.exp(sum(weight * math.log(times[rows]) for rows, weight in WEIGHTS.items()))


def rank(times: Mapping[str, Times], order: Sequence[str]) -> list[str]:
    """The names in `times`, the best first: the fastest by `score`, but of those that it leads by less than 10 % the
    first in `order`, so that hosts of one kind agree whatever little a trial was disturbed.
    """
    left = {name: score(times[name]) for name in order if name in times}
    ranked: list[str] = []
    while left:
        fastest = min(left.values())
        best = next(name for name in left if left[name] < LEAD * fastest)
        ranked.append(best)
        del left[best]
    return ranked


def _failure(said: Mapping[str, Any]) -> Attempt:
    name = said.get("signal", "")
    if name in ("SIGPROF", "SIGALRM"):
        problem = "it does not come to an end"
    elif name:
        problem = f"it ends the process with {name}"
    else:
        problem = f"it cannot be tried: {said.get('error')}"
    return Attempt(problem, lasting=name in _OWN_SIGNALS)


def _run(what: str, libraries: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    told = [part for name, path in libraries.items() for part in (name, str(path))]
    # Isolated: neither the packages of this process nor its signal handlers are wanted, and it starts sooner.
    command = [sys.executable, "-I", "-S", str(_PROGRAM), what, *told]
    try:
        said = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=_LONGEST_S
        ).stdout
        found: dict[str, dict[str, Any]] = json.loads(said)
    except subprocess.CalledProcessError as error:
        last = str(error.stderr).strip().splitlines()[-1:] or [f"status {error.returncode}"]
        raise OSError(f"the process that tries them fails: {last[0]}") from None
    except (subprocess.TimeoutExpired, ValueError) as error:
        raise OSError(f"the process that tries them fails: {error}") from None
    return found
