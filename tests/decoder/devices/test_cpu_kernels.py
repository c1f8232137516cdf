"""The kernels' other instruction sets, how they are compiled, and life without them."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from services.decoder.devices.base.ops import BaseOps
from services.decoder.devices.base.row_check import rows_are_equal
from services.decoder.devices.cpu import ops as cpu
from services.decoder.devices.cpu.device import CpuDevice
from services.decoder.devices.cpu.torch_ops import TorchCpuOps
from services.decoder.steps.attention_meta import Heads
from services.vision_encoder.devices.cpu import device as vision_encoder
from shared.cpu_kernels import binding, choice, compiling
from shared.cpu_kernels.instruction_sets import InstructionSet
from shared.errors import InvalidRequest
from shared.weights.linear_weight import in_memory
from tests.support.decoder.instruction_sets import RUNNABLE, each, open_kernels
from tests.support.decoder.paged_rows import LENGTHS, ROWS, Cache

CPU = torch.device("cpu")
if not RUNNABLE:
    pytest.skip("there are no kernels for this processor", allow_module_level=True)


@pytest.fixture(scope="module", params=each())
def kernels(request: pytest.FixtureRequest) -> binding.Kernels:
    return open_kernels(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_instruction_set_computes_the_same(
    kernels: binding.Kernels, dtype: torch.dtype
) -> None:
    ops, plain = cpu.CpuOps(dtype, kernels), BaseOps(CPU, dtype)
    close: dict[str, Any] = (
        {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.03, "atol": 0.03}
    )
    torch.manual_seed(0)
    weight, bias, x = torch.randn(100, 70) / 8, torch.randn(100), torch.randn(29, 70).to(dtype)
    for function in ("linear", "gate_up_swiglu"):
        packing = "pack" if function == "linear" else "pack_gate_up"
        ours, theirs = (
            getattr(o, function)(x, getattr(o, packing)(in_memory(weight, bias)))
            for o in (ops, plain)
        )
        torch.testing.assert_close(ours, theirs, **close)
    for heads in (Heads(14, 2, 64), Heads(6, 3, 40)):
        found = Cache(ops, heads, LENGTHS).attend(ROWS, window=200)
        expected = Cache(plain, heads, LENGTHS).attend(ROWS, window=200)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a.float(), b.float(), **close)
    assert rows_are_equal(ops)


@pytest.mark.parametrize("block_size", [32, 48, 128])
def test_blocks_of_several_pages(block_size: int) -> None:
    """A block may be any multiple of what the kernels keep together."""
    heads = Heads(4, 2, 16)
    results = []
    own = CpuDevice(torch.float32, block_size=block_size).ops
    for ops in (own, BaseOps(CPU, torch.float32, block_size)):
        results.append(Cache(ops, heads, LENGTHS).attend(ROWS))
    assert isinstance(own, cpu.CpuOps)
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_block_size_that_the_kernels_do_not_know_is_left_to_torch() -> None:
    assert isinstance(CpuDevice(torch.float32, block_size=8).ops, TorchCpuOps)


def test_without_a_compiler_torch_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "find", lambda known: None)
    monkeypatch.setenv("PATH", "/nowhere")
    binding.load_kernels.cache_clear()
    try:
        assert isinstance(CpuDevice(torch.bfloat16).ops, TorchCpuOps)
    finally:
        binding.load_kernels.cache_clear()


def test_a_compiler_that_fails_is_no_reason_to_fail(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho out of luck >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(compiling, "find", lambda known: None)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    binding.load_kernels.cache_clear()
    try:
        assert binding.load_kernels(1) is None
    finally:
        binding.load_kernels.cache_clear()


def test_the_script_says_what_there_is() -> None:
    command = [sys.executable, str(compiling.SOURCES.parent / "build.py"), "--status"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert said == choice.status() + "\n"
    assert said.startswith(f"{RUNNABLE[0].name}, compiled, ")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Asks for an instruction set as a user does."""
    binding.load_kernels.cache_clear()
    yield lambda name: monkeypatch.setenv("TESSERA_CPU_INSTRUCTIONS", name)
    binding.load_kernels.cache_clear()


@pytest.mark.parametrize("known", each())
def test_a_set_can_be_forced(asked: Callable[[str], None], known: InstructionSet) -> None:
    open_kernels(known)
    asked(known.name)
    kernels = binding.load_kernels(1)
    assert kernels is not None
    assert kernels.name == known.name
    assert choice.status(known.name) == f"{known.name}, compiled, as asked"
    with capture_logs() as lines:
        CpuDevice(torch.bfloat16)
        vision_encoder.CpuDevice(torch.bfloat16)
    told = [(line["instructions"], line["why"]) for line in lines if line["event"] == "CPU kernels"]
    assert told == 2 * [(known.name, "as asked")]


def test_none_leaves_the_work_to_torch(asked: Callable[[str], None]) -> None:
    asked("none")
    assert isinstance(CpuDevice(torch.bfloat16).ops, TorchCpuOps)
    assert choice.status("none") == "torch alone, as asked"


FOREIGN = {"x86_64": "neon", "aarch64": "avx2"}[RUNNABLE[0].machine]


@pytest.mark.parametrize(
    ("name", "problem"), [("sse9", "no such set"), (FOREIGN, "this machine lacks these")]
)
def test_a_set_that_cannot_run_is_refused(
    asked: Callable[[str], None], name: str, problem: str
) -> None:
    asked(name)
    with pytest.raises(InvalidRequest, match=f"'{name}': .*{problem}.* {RUNNABLE[0].name}"):
        binding.load_kernels(1)
