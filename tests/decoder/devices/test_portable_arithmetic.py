"""Portable arithmetic: the bits of one processor are those of another."""

from pathlib import Path

import pytest
import torch

from services.decoder.devices.cpu.device import CpuDevice
from services.decoder.loading.load import load
from services.decoder.settings import DecoderSettings
from shared.cpu_kernels import binding, choice, instruction_sets
from tests.support.checkpoints import make_checkpoint
from tests.support.decoder.prompts_step import LARGEST, run_next, run_prompts
from tests.support.decoder.step_stream import greedy

SETS = choice.choose("", portable=True).sets

# What it takes to compile the sets; `make self-test` compares every kernel's results, those of NEON too.
pytestmark = pytest.mark.full
if len(SETS) < 2:
    pytest.skip("this processor has one set in portable arithmetic", allow_module_level=True)


@pytest.fixture(autouse=True)
def portable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_CPU_ARITHMETIC", "portable")


def results_of(folder: Path, name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Tokens and log-probabilities of prompts and of steps behind them, computed by a set."""
    monkeypatch.setenv("TESSERA_CPU_INSTRUCTIONS", name)
    binding.load_kernels.cache_clear()
    try:
        settings = DecoderSettings(
            model=folder, dtype=dtype, cpu_arithmetic="portable", max_num_seqs=8, max_model_len=512
        )
        loaded = load(settings)
        assert isinstance(loaded.device, CpuDevice)
        assert loaded.numerics.startswith("portable-")
        steps = [
            run_prompts(loaded.worker, greedy(logprobs=20)),
            run_next(loaded.worker, [0, LARGEST]),
        ]
        return [part for step in steps for part in (step.tokens, step.top_ids, step.top_logprobs)]
    finally:
        binding.load_kernels.cache_clear()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_every_set_gives_equal_bits(
    tmp_path: Path, family: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    folder = tmp_path / family
    make_checkpoint(folder, family)
    first, *others = [results_of(folder, known.name, dtype, monkeypatch) for known in SETS]
    assert all(first), "tokens and log-probabilities"
    for known, other in zip(SETS[1:], others, strict=True):
        assert other == first, f"{known.name} differs from {SETS[0].name}"


def test_a_set_that_it_does_without_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choice.choose("avx512_bf16", portable=True).sets[0].name == "avx512"
    assert "avx512_bf16" not in {known.name for known in SETS}
    assert {known.arithmetic for known in SETS} == {instruction_sets.portable(SETS[0]).arithmetic}  # type: ignore[union-attr]
