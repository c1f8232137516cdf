"""Operations of a device that are tried against a reference, and the line that is printed of each."""

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from torch import Tensor

_REPEATS = 5


@dataclass(frozen=True)
class Case:
    """An operation: what it gives, what it should give, and the bytes that it reads and writes."""

    name: str
    run: Callable[[], Sequence[Tensor]]
    expected: Sequence[Tensor]
    nbytes: int
    tolerance: float
    detail: str | None = None  # of how it is computed


@dataclass(frozen=True)
class Result:
    """What is printed of one thing that was tried. error: the largest difference; us: microseconds a call."""

    name: str
    ok: bool
    error: float | None = None
    us: float | None = None
    gb_s: float | None = None
    detail: str | None = None

    def to_json(self) -> str:
        """One line; what is not a number is null."""
        values = asdict(self)
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        return json.dumps(finite)


def try_case(
    case: Case, kind: str, synchronize: Callable[[], object], explain: Callable[[Exception], str]
) -> Result:
    """kind: the element type's name; `synchronize` waits for the device; `explain` says what an error of it means."""
    name = f"{case.name}, {kind}"
    try:
        found = [tensor.cpu().float() for tensor in case.run()]
        seconds = seconds_of(case.run, synchronize)
    except (RuntimeError, OSError) as error:
        return Result(name, False, detail=explain(error))
    pairs = zip(found, case.expected, strict=True)
    worst = max(float((ours - theirs.float()).abs().max()) for ours, theirs in pairs)
    ok = worst <= case.tolerance  # not a number is not less
    return Result(name, ok, worst, 1e6 * seconds, case.nbytes / seconds / 1e9, case.detail)


def print_results(results: Iterable[Result]) -> int:
    """A line for each as it comes. Returns the process's exit status: 1 if something is not right."""
    wrong = 0
    for result in results:
        wrong += not result.ok
        print(result.to_json(), flush=True)
    return int(bool(wrong))


def seconds_of(run: Callable[[], object], synchronize: Callable[[], object]) -> float:
    """Of one call, the first left out."""
    run()
    synchronize()
    began = time.perf_counter()
    for _ in range(_REPEATS):
        run()
    synchronize()
    return max(1e-9, (time.perf_counter() - began) / _REPEATS)


def read_result(line: str) -> Result | None:
    """The opposite of `Result.to_json`; None for a line of something else."""
    try:
        values = json.loads(line)
        return Result(**values)
    except (ValueError, TypeError):
        return None
