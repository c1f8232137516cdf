"""Checkpoints whose activations have 8 bits, of compressed-tensors and msmodelslim, on an NPU."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.decoder.devices.npu.device import NpuDevice
from services.decoder.devices.npu.weights.coded_linear import ROWS, VIEW, WHOLE, CodedLinear
from services.decoder.models.llama import Llama
from shared.checkpoint.folder import Checkpoint
from tests.ascend.decoder.test_served_codes import LAYERS, TEXT, TIE, TIE_OF_WHOLE, generate
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.checkpoints.ascend_codes import NARROW, STATIC, STEP, ZERO, write_ascend
from tests.support.checkpoints.coded import Coded, write_coded
from tests.support.decoder.greedy_reference import assert_greedy

# Where activations are cut off, steps of 16 bits before that make other whole numbers.
TIES = {STATIC: 0.5}


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("W8A8", 1),
        pytest.param("W8A8", 2, marks=pytest.mark.full),
        pytest.param("W8A8_DYNAMIC", 1, marks=pytest.mark.full),
        pytest.param("W8A8_DYNAMIC", 2, marks=pytest.mark.full),
        pytest.param("W8A16", 1, marks=pytest.mark.full),
    ],
)
async def test_a_decoder_says_what_the_numbers_say(
    tmp_path: Path, short_tmp: Path, monkeypatch: pytest.MonkeyPatch, kind: str, ranks: int
) -> None:
    """The codes of queries, keys and values have their biases too."""
    monkeypatch.setenv("FAKE_NPU_COUNT", str(ranks))
    dense = make_checkpoint(tmp_path / "dense", "qwen2", text=TEXT)
    layers = write_ascend(tmp_path / "coded", dense, kind)
    folder = tmp_path / "coded"
    texts = await generate(folder, short_tmp / "s", LAYERS - 1, tensor_parallel_size=ranks)
    reference = load_reference(dense)
    if kind == STATIC:
        for layer in layers:
            reference.get_submodule(layer).register_forward_pre_hook(_with_fixed_steps)
    for text in texts:
        assert_greedy(reference, text.prompt, text.output, tie=TIES.get(kind, TIE_OF_WHOLE))


def _with_fixed_steps(_: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Activations as whole numbers of 8 bits times the step of the checkpoint."""
    whole = (given[0] / STEP).round().add(ZERO).clamp(-128, 127) - ZERO
    return whole * STEP


@pytest.mark.parametrize(
    ("group", "version", "others", "options"),
    [
        (32, "1.0.0", "", {}),
        pytest.param(0, "1.0.0", "W8A8_DYNAMIC", {"graphs": "on"}, marks=pytest.mark.full),
        pytest.param(32, "0", "", {"tensor_parallel_size": 2}, marks=pytest.mark.full),
    ],
)
async def test_codes_of_4_bits_meet_activations_of_16(
    tmp_path: Path,
    short_tmp: Path,
    monkeypatch: pytest.MonkeyPatch,
    group: int,
    version: str,
    others: str,
    options: dict[str, Any],
) -> None:
    """W4A8: the operators have no product of codes of 4 bits and whole numbers of 8."""
    monkeypatch.setenv("FAKE_NPU_COUNT", str(options.get("tensor_parallel_size", 1)))
    dense = make_checkpoint(tmp_path / "dense", "llama", text=TEXT)
    folder = tmp_path / "coded"
    write_ascend(folder, dense, NARROW, group=group, version=version, others=others)
    texts = await generate(folder, short_tmp / "s", LAYERS - 1, **options)
    reference = load_reference(dense)
    for text in texts:
        assert_greedy(reference, text.prompt, text.output, tie=TIE_OF_WHOLE if others else TIE)


@pytest.mark.parametrize(
    ("group", "version", "sizes"),
    [(32, "1.0.0", (2, 128)), (0, "1.0.0", (1, 128)), (32, "0", (2, 128))],
)
def test_codes_of_4_bits_are_packed_with_the_scales_of_their_groups(
    tmp_path: Path, group: int, version: str, sizes: tuple[int, int]
) -> None:
    dense = make_checkpoint(tmp_path / "dense", "llama", text=TEXT)
    write_ascend(tmp_path / "coded", dense, NARROW, group=group, version=version)
    numbers = load_file(dense / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    weights = Llama._weights(Checkpoint(tmp_path / "coded"))
    ops = NpuDevice(torch.float16).ops
    packed = ops.pack(weights.take_linear("layers.0.mlp.up_proj", *numbers.shape))
    assert isinstance(packed, CodedLinear) and packed.form in (ROWS, VIEW)
    [piece] = packed.pieces
    assert tuple(piece.scales.shape) == sizes and piece.group == group
    x = torch.randn((3, numbers.shape[1]), generator=torch.Generator().manual_seed(1)).half()
    found = ops.linear(x.to(piece.codes.device), packed).cpu().double()
    torch.testing.assert_close(found, x.double() @ numbers.double().T, atol=2e-2, rtol=2e-3)


def write_compressed(folder: Path, dense: Path, activations: dict[str, object] | None) -> None:
    write_coded(folder, dense, Coded("int-quantized", bits=8, group=0, symmetric=True))
    path = folder / "config.json"
    config = json.loads(path.read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"] = activations
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("activations", "is_whole"),
    [
        ({"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}, True),
        ({"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}, False),
        (None, False),
    ],
)
def test_activations_have_the_bits_that_compressed_tensors_says(
    tmp_path: Path, activations: dict[str, object] | None, is_whole: bool
) -> None:
    dense = make_checkpoint(tmp_path / "dense", "llama")
    write_compressed(tmp_path / "coded", dense, activations)
    weights = Llama._weights(Checkpoint(tmp_path / "coded"))
    name = "layers.0.mlp.up_proj"
    out, inputs = weights.shape(f"{name}.weight")
    weight = weights.take_linear(name, out, inputs)
    ops = NpuDevice(torch.float16).ops
    packed = ops.pack(weight)
    assert isinstance(packed, CodedLinear) and (packed.form == WHOLE) == is_whole
    # An operator that is not to be had, or not right, is no matter: the codes are the same.
    other = NpuDevice(torch.float16, forms="-quant_matmul").ops.pack(weight)
    assert isinstance(other, CodedLinear) and other.form != WHOLE
