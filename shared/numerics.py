"""What the bits of a process's results depend on beyond model, weights and element type, as a short text.

Two processes with equal numerics, of the same model and weights, compute equal bits where rows do not depend on their
neighbours. The texts are compared and shown, never parsed; none contains a "+", which joins those of two processes.
"""

import re

import torch

from shared.cpu_kernels.arithmetic import ARITHMETIC_VERSION


def of_cpu(instructions: str, by_torch: bool) -> str:
    """Of a CPU. instructions: of the kernels that compute, "" where torch does; by_torch: some of the work is done by
    operations of torch whose bits differ between its versions and instruction sets."""
    kernels = f"{instructions}-{ARITHMETIC_VERSION}" if instructions else ""
    torchs = f"torch-{torch.__version__}-{torch.backends.cpu.get_cpu_capability()}"
    return _text(kernels, torchs if by_torch or not instructions else "")


def of_accelerator(device: str, kind: str) -> str:
    """Of a device that computes with its libraries, such as "cuda" of the kind "NVIDIA H100 80GB HBM3"."""
    return _text(f"{device}-{kind}")


def _text(*parts: str) -> str:
    return "/".join(re.sub(r"[^a-z0-9._]+", "-", part.lower()).strip("-") for part in parts if part)
