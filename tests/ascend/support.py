"""What several tests on the simulated NPU share."""

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import IO

import torch
from torch import Tensor

from tests.ascend.prepared import Prepared


def run_python(code: str, environment: Mapping[str, str], timeout: float = 280) -> str:
    """What a Python process prints that has its imports behind it (`prepared.py`); raises AssertionError with its
    output if it fails."""
    with tempfile.TemporaryFile() as output:
        status = Prepared(code, environment, output.fileno()).wait(timeout)
        return _checked(status, output)


def run_new_python(code: str, environment: Mapping[str, str], timeout: float = 280) -> str:
    """The same by a process that begins as every other does."""
    with tempfile.TemporaryFile() as output:
        command = [sys.executable, "-c", code]
        run = subprocess.run(
            command, env=environment, timeout=timeout, stdout=output, stderr=subprocess.STDOUT
        )
        return _checked(run.returncode, output)


def _checked(status: int, output: IO[bytes]) -> str:
    output.seek(0)
    said = output.read().decode(errors="replace")
    assert status == 0, f"status {status}\n{said}"
    return said


def largest_difference(one: Tensor, other: Tensor) -> float:
    """Between the elements of two tensors, wherever they are."""
    return float((one.cpu().double() - other.cpu().double()).abs().max())


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float16) -> Tensor:
    """Normal values, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
