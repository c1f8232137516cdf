"""Which set of CPU kernels runs here. Nothing but the standard library is needed here."""

from shared.cpu_kernels import compiling, instruction_sets
from shared.cpu_kernels.instruction_sets import INSTRUCTION_SETS, InstructionSet


def runnable_instruction_sets() -> tuple[InstructionSet, ...]:
    """What this machine has, the best first."""
    return instruction_sets.named_by_processor()


def choose(asked: str) -> InstructionSet | None:
    """The set of that name, or with "" the best that this machine has; None for "none" and where there is
    none for it: then torch does the work. Raises ValueError for one that cannot run here."""
    runnable = runnable_instruction_sets()
    if asked == "none":
        return None
    if not asked:
        return next(iter(runnable), None)
    for known in runnable:
        if known.name == asked:
            return known
    is_known = any(asked == known.name for known in INSTRUCTION_SETS)
    problem = "this machine lacks these instructions" if is_known else "there is no such set"
    here = ", ".join([*(known.name for known in runnable), "none"])
    raise ValueError(f"CPU instructions {asked!r}: {problem}; it may be {here}")


def status(asked: str = "") -> str:
    """What a process will use, in a line. Raises ValueError as `choose` does."""
    known = choose(asked)
    if known is None:
        return "torch alone, as asked" if asked else "torch alone: none for this processor"
    how = "compiled" if compiling.find(known) else "to be compiled"
    return f"{known.name}, {how}{', as asked' if asked else ''}"
