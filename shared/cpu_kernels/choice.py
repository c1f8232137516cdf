"""Which set of CPU kernels runs here, and why.

Of those that the processor names, a set can be used if its library says so in a process of its own (`trial.py`), and
the best is the one that was fastest there: names do not tell. Both are found out once for a host (`probe.py`) and kept
(`findings.py`). Nothing but the standard library is needed here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.cpu_kernels import compiling, instruction_sets, trial
from shared.cpu_kernels.findings import FindingsFile
from shared.cpu_kernels.instruction_sets import INSTRUCTION_SETS, InstructionSet
from shared.cpu_kernels.probe import Probe


@dataclass(frozen=True)
class Choice:
    """`sets`: what can be used here, the best first; a process that cannot open that one takes the next. None at all:
    torch does the work. `why`: for a log; `warnings`: a line for each set passed over and for what else went wrong.
    """

    sets: tuple[InstructionSet, ...]
    why: str
    warnings: tuple[str, ...] = ()


def choose(
    asked: str, keep_in: Path | None = None, *, may_compile: bool = True, portable: bool = False
) -> Choice:
    """What runs where `TESSERA_CPU_INSTRUCTIONS` is `asked`: the set of that name, none for "none", the best for "".

    keep_in: a folder for what is found out (unless given, beside the libraries). may_compile: what is missing is
    compiled first, if there is a compiler; without it, nothing is tried before all are compiled. While something is
    found out, other processes of the host wait for it: less than a second, with compiling some ten. Raises ValueError
    for a set that there is not or that cannot run here. portable: of the sets in portable arithmetic.
    """
    if asked == "none":
        return Choice((), "as asked")
    if portable:
        asked = instruction_sets.portable_name(asked)
    named = instruction_sets.named_by_processor(in_portable=portable)
    file = FindingsFile(named, [keep_in] if keep_in else compiling.folders())
    if asked:
        return _as_asked(asked, named, file, may_compile)
    if not named:
        return Choice((), "none for this processor")
    missing = uncompiled("", portable=portable)
    if compiling.compiler() is None and len(missing) == len(named):
        return Choice((), f"not compiled, and {compiling.NO_COMPILER}")
    if not may_compile and compiling.compiler() and set(missing) - file.read().uncompiled.keys():
        return Choice(named, "the first by name: the best is found out when all are compiled")
    probe = Probe(named, file, may_compile)
    probe.run(timed=True)
    return _best(probe)


def uncompiled(asked: str, *, portable: bool = False) -> list[str]:
    """The sets that `choose` would compile."""
    if portable:
        asked = instruction_sets.portable_name(asked)
    named = instruction_sets.named_by_processor(in_portable=portable)
    wanted = [known for known in named if asked in ("", known.name)]
    return [known.name for known in wanted if compiling.find(known) is None]


def runnable_instruction_sets(keep_in: Path | None = None) -> tuple[InstructionSet, ...]:
    """All that can be used here, compiled if need be, the best first."""
    return choose("", keep_in).sets


def status(asked: str = "", keep_in: Path | None = None, *, portable: bool = False) -> str:
    """What a process will use and why, in a line. Raises ValueError as `choose` does."""
    chosen = choose(asked, keep_in, may_compile=False, portable=portable)
    said = f"torch alone, {chosen.why}"
    if chosen.sets:
        best = chosen.sets[0]
        said = f"{best.label}, {'' if compiling.find(best) else 'to be '}compiled, {chosen.why}"
    return "; ".join([said, *chosen.warnings])


def _best(probe: Probe) -> Choice:
    usable = {known.name: known for known in probe.usable()}
    names, times, warnings = list(usable), probe.times(), _warnings(probe)
    if not names:
        why = "none can be used"
    elif len(names) == 1:
        why = "no other can be used"
    elif len(times) < len(names):
        why = "the first by name"
    else:
        names = trial.rank(times, names)
        first, *others = (trial.score(times[name]) for name in names)
        ratios = (f"{each / first:.2f}" for each in others)
        told = ", ".join(f"{name} {ratio}" for name, ratio in zip(names[1:], ratios, strict=True))
        why = f"by trial ({told} times its time)"
    return Choice(tuple(usable[name] for name in names), why, warnings)


def _as_asked(
    asked: str, named: Sequence[InstructionSet], file: FindingsFile, may_compile: bool
) -> Choice:
    known = next((each for each in named if each.name == asked), None)
    if known is not None:
        if not may_compile and compiling.find(known) is None:
            return Choice((known,), "as asked")
        probe = Probe([known], file, may_compile)
        probe.run(timed=False)
        if probe.usable() or compiling.find(known) is None:
            return Choice(tuple(probe.usable()), "as asked", _warnings(probe))
        problem = probe.problems()[asked]
    elif any(asked == each.name for each in INSTRUCTION_SETS):
        problem = "this machine lacks these instructions"
    else:
        problem = "there is no such set"
    raise ValueError(
        f"CPU instructions {asked!r}: {problem}; it may be {', '.join(_possible(named, file))}"
    )


def _possible(named: Sequence[InstructionSet], file: FindingsFile) -> list[str]:
    """What may be asked for here: a set that is not compiled yet counts."""
    probe = Probe(named, file, may_compile=False)
    probe.run(timed=False)
    compilable = {known.name for known in named if compiling.find(known) is None}
    refused = probe.problems().keys() - compilable
    return [*(known.name for known in named if known.name not in refused), "none"]


def _warnings(probe: Probe) -> tuple[str, ...]:
    passed_over = [
        f"{name} is passed over: {problem}" for name, problem in probe.problems().items()
    ]
    return (*passed_over, *probe.warnings)
