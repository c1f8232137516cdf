"""The compiled kernels of every instruction set that this machine can run."""

from shared.cpu_kernels import binding, build

RUNNABLE = build.runnable_instruction_sets()


def open_kernels(known: build.InstructionSet, threads: int = 2) -> binding.Kernels:
    """With as many threads as test machines have cores."""
    return binding.open_kernels(known, threads)
