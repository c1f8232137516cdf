"""Checkpoints of numbers of 4 bits: read as they are declared, or refused by the tensor's name."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.decoder.models.llama import Llama
from services.families.check import Parts, require_servable
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from tests.decoder.loading.test_quantization import loaded_with, log_probabilities
from tests.support.checkpoints import make_checkpoint
from tests.support.checkpoints.broken_layer import LAYER, removed, replaced
from tests.support.checkpoints.coded import edit_quantization
from tests.support.checkpoints.float4 import Float4, write_float4

WAYS = [
    Float4("nvfp4"),
    Float4("mxfp4"),
    Float4("mxfp4", "auto-round"),
    Float4("nvfp4", "modelopt"),
]


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_codes_are_the_numbers_that_are_stored(tmp_path: Path, how: Float4) -> None:
    numbers = write_float4(tmp_path / "coded", make_checkpoint(tmp_path / "dense", "llama"), how)
    require_servable(tmp_path / "coded", device="cpu")
    weights = Llama._weights(Checkpoint(tmp_path / "coded"))
    for name, expected in numbers.items():
        weight = weights.take_linear(name.removeprefix("model."), *expected.shape)
        codes = weight.quantized()
        assert codes is not None and (codes.bits, codes.group) == (4, how.group)
        assert torch.equal(weight.dense(torch.float32), expected)
        rows = weight.shard("out", [(3, 13), (22, 31)]).dense(torch.float32)
        assert torch.equal(rows, expected[[*range(3, 13), *range(22, 31)]])


@pytest.mark.parametrize("how", WAYS[:2], ids=str)
def test_a_decoder_computes_with_them(tmp_path: Path, how: Float4) -> None:
    write_float4(tmp_path / "coded", make_checkpoint(tmp_path / "dense", "llama"), how)
    expected = log_probabilities(loaded_with(tmp_path / "dense", "none", dtype="float32"))
    exact = log_probabilities(loaded_with(tmp_path / "coded", "none", dtype="float32"))
    assert torch.equal(exact, expected)
    coded = log_probabilities(loaded_with(tmp_path / "coded", "auto", dtype="float32"))
    # Activations are rounded to 14 bits.
    assert 0 < (coded - expected).abs().max() < 2e-2


@pytest.mark.parametrize(
    ("how", "change", "weights", "said"),
    [
        (WAYS[0], removed("weight_global_scale"), {}, r"weight_global_scale .* lacks it"),
        (WAYS[0], replaced("weight_scale", torch.ones(32, 4)), {}, r"weight_scale .* be F8_E4M3"),
        (WAYS[1], replaced("weight_scale", torch.ones(32, 2)), {}, r"weight_scale .* be U8"),
        (WAYS[1], replaced("weight_packed", torch.ones(32, 32)), {}, r"weight_packed .* be U8"),
        (WAYS[0], None, {"group_size": 32}, "group_size is 32 and may be 16"),
        (WAYS[1], None, {"strategy": "channel"}, "strategy is 'channel' and may be group"),
        (WAYS[1], None, {"num_bits": 8}, "num_bits is 8"),
        (WAYS[1], None, {"type": "int"}, "type is 'int'"),
    ],
)
def test_wrong_ones_are_refused_by_name_before_anything_is_started(
    tmp_path: Path,
    how: Float4,
    change: Callable[[dict[str, Tensor]], None] | None,
    weights: dict[str, Any],
    said: str,
) -> None:
    folder = tmp_path / "coded"
    write_float4(folder, make_checkpoint(tmp_path / "dense", "llama"), how)
    if change is not None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    said_now = how.config()["config_groups"]["group_0"]
    groups = {"group_0": {**said_now, "weights": said_now["weights"] | weights}}
    edit_quantization(folder, config_groups=groups)
    with pytest.raises(InvalidRequest, match=said):
        require_servable(folder, parts=Parts.WEIGHTS, device="cpu")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_algo": "W4A16_AWQ"}, "quant_algo is 'W4A16_AWQ' and may be FP8 or NVFP4"),
        ({"quantization": {"quant_algo": "W4A8_AWQ"}}, r"quantization\.quant_algo is 'W4A8_AWQ'"),
        ({"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}, ""),
        ({"group_size": 32}, "group_size is 32 and may be 16"),
        ({"ignore": [LAYER]}, r"k_proj\.weight .* says that it is not quantized"),
    ],
)
def test_model_optimizer_is_read_as_it_is_declared(
    tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    folder = tmp_path / "coded"
    write_float4(folder, make_checkpoint(tmp_path / "dense", "llama"), WAYS[3])
    edit_quantization(folder, **config)
    with pytest.raises(InvalidRequest, match=said) if said else nullcontext():
        require_servable(folder, parts=Parts.WEIGHTS, device="cpu")


@pytest.mark.parametrize(
    ("how", "part"),
    [(WAYS[0], "weight_scale"), (WAYS[0], "weight_global_scale"), (WAYS[1], "weight_scale")],
)
def test_scales_that_are_no_numbers_are_refused(tmp_path: Path, how: Float4, part: str) -> None:
    folder = tmp_path / "coded"
    write_float4(folder, make_checkpoint(tmp_path / "dense", "llama"), how)
    tensors = load_file(folder / "model.safetensors")
    scales = tensors[f"{LAYER}.{part}"]
    if part == "weight_global_scale":
        scales[0] = 0
    else:
        scales.view(torch.uint8)[0, 0] = 255  # no number in either type
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        InvalidRequest, match=r"k_proj\.weight_scale cannot be used: it has an elem"
    ):
        loaded_with(folder, "auto")
