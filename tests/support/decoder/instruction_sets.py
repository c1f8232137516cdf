"""The compiled kernels of every instruction set that this machine can run."""

import pytest

from shared.cpu_kernels import binding, build

RUNNABLE = build.runnable_instruction_sets()

# For parametrized tests: the set that servers here take, and in `make test-full` the others, which are compiled first.
EACH = [
    pytest.param(known, id=known.name, marks=pytest.mark.full if place else ())
    for place, known in enumerate(RUNNABLE)
]


def open_kernels(known: build.InstructionSet, threads: int = 2) -> binding.Kernels:
    """With as many threads as test machines have cores."""
    return binding.open_kernels(known, threads)
