"""The compiled kernels of every instruction set that this machine can run."""

import ctypes

from shared.cpu_kernels import binding, build

RUNNABLE = build.runnable_instruction_sets()


def open_kernels(known: build.InstructionSet, threads: int = 2) -> binding.Kernels:
    """Compiled if need be; a pool of their own."""
    path = build.find(known) or build.compile_library(known)
    return binding.Kernels(ctypes.CDLL(str(path)), known.name, threads)
