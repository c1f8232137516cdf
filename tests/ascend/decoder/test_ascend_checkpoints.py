"""Checkpoints whose activations have 8 bits, of compressed-tensors and msmodelslim, on an NPU."""

import json
from pathlib import Path

import pytest
import torch

from services.decoder.devices.npu.coded_linear import WHOLE, CodedLinear
from services.decoder.devices.npu.device import NpuDevice
from services.decoder.models.llama import Llama
from shared.checkpoint.folder import Checkpoint
from tests.ascend.decoder.test_served_codes import LAYERS, TEXT, TIE_OF_WHOLE, generate
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.checkpoints.ascend_codes import STATIC, STEP, ZERO, write_ascend
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
