"""What several tests on the simulated NPU share."""

import subprocess
import sys
from collections.abc import Mapping

import torch
from torch import Tensor


def run_python(code: str, environment: Mapping[str, str], timeout: float = 280) -> str:
    """What a Python process prints; raises CalledProcessError with its output if it fails."""
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        timeout=timeout,
        capture_output=True,
        text=True,
    )
    if run.returncode:
        raise AssertionError(f"status {run.returncode}\n{run.stdout}\n{run.stderr}")
    return run.stdout


def largest_difference(one: Tensor, other: Tensor) -> float:
    """Between the elements of two tensors, wherever they are."""
    return float((one.cpu().double() - other.cpu().double()).abs().max())


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float16) -> Tensor:
    """Normal values, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
