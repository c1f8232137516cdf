"""The compiled kernels of every instruction set that this machine can run."""

from collections.abc import Callable

import pytest
from _pytest.mark import ParameterSet

from shared.cpu_kernels import binding, choice
from shared.cpu_kernels.instruction_sets import InstructionSet
from shared.settings import cpu_trial_folder

RUNNABLE = choice.runnable_instruction_sets(cpu_trial_folder())


def open_kernels(known: InstructionSet, threads: int = 2) -> binding.Kernels:
    """With as many threads as test machines have cores."""
    return binding.open_kernels(known, threads)


def each(
    make: Callable[[InstructionSet], object] = lambda known: known,
) -> list[ParameterSet]:
    """Parameters of a test: the set that servers take here, and in `make test-full` the others, which are compiled
    for it."""
    return [
        pytest.param(make(known), id=known.name, marks=pytest.mark.full if place else ())
        for place, known in enumerate(RUNNABLE)
    ]
