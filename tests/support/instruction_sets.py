"""The compiled kernels of every instruction set that this machine can run."""

import ctypes

from shared.cpu_kernels import binding, build

HERE = build.best_instruction_set()
RUNNABLE = () if HERE is None else build.INSTRUCTION_SETS[build.INSTRUCTION_SETS.index(HERE) :]


def open_kernels(known: build.InstructionSet, threads: int = 2) -> binding.Kernels:
    """Compiled if need be; a pool of their own."""
    path = build.find(known) or build.compile_library(known)
    return binding.Kernels(ctypes.CDLL(str(path)), known.name, threads)
