"""Checkpoints of numbers of 8 bits: read as they are declared, or refused by the tensor's name."""

from collections.abc import Callable
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
from tests.support.checkpoints.float8 import Float8, write_float8

COMPRESSED = "compressed-tensors"
WAYS = [
    Float8(),  # as DeepSeek and Qwen3-FP8 have it, in smaller blocks
    Float8(block=(24, 40), scales=torch.bfloat16),
    Float8(block=None, one_scale=True),
    Float8(block=None, one_scale=True, scalar=True),
    Float8(COMPRESSED, block=None),
    Float8(COMPRESSED, block=None, one_scale=True, scales=torch.bfloat16),
    Float8(COMPRESSED),
    Float8("fbgemm_fp8", block=None),
    Float8("modelopt", block=None, one_scale=True, scalar=True),
]


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_numbers_are_what_is_stored_times_its_scale(tmp_path: Path, how: Float8) -> None:
    dense = make_checkpoint(tmp_path / "dense", "llama")
    numbers = write_float8(tmp_path / "coded", dense, how)
    require_servable(tmp_path / "coded", device="cpu")
    weights = Llama._weights(Checkpoint(tmp_path / "coded"))
    for name, expected in numbers.items():
        weight = weights.take_linear(name.removeprefix("model."), *expected.shape)
        assert weight.quantized() is None
        assert torch.equal(weight.dense(torch.float32), expected)
        assert torch.equal(weight.dense(torch.bfloat16), expected.bfloat16())
        rows = weight.shard("out", [(3, 13), (22, 31)]).dense(torch.float32)
        assert torch.equal(rows, expected[[*range(3, 13), *range(22, 31)]])
        columns = weight.shard("in", [(5, 50)]).dense(torch.float32)
        assert torch.equal(columns, expected[:, 5:50])


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_decoder_computes_with_them_and_may_quantize_them(
    tmp_path: Path, quantization: str
) -> None:
    dense = make_checkpoint(tmp_path / "dense", "llama")
    write_float8(tmp_path / "coded", dense, WAYS[0])
    ours, theirs = (
        log_probabilities(loaded_with(tmp_path / name, quantization, dtype="float32"))
        for name in ("coded", "dense")
    )
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("how", "change", "config", "said"),
    [
        (WAYS[0], removed("weight_scale_inv"), {}, r"k_proj\.weight_scale_inv .* lacks it"),
        (WAYS[0], removed("weight"), {}, r"k_proj\.weight cannot be used: the checkpoint lacks it"),
        (WAYS[0], replaced("weight", torch.zeros(32, 64)), {}, r"k_proj\.weight .* be F8_E4M3"),
        (
            WAYS[0],
            replaced("weight_scale_inv", torch.ones(3, 2)),
            {},
            r"weight_scale_inv cannot be used: it is F32 \[3, 2\] and has to be .* \[2, 2\]",
        ),
        (WAYS[4], removed("weight_scale"), {}, r"k_proj\.weight_scale cannot be used"),
        (WAYS[0], None, {"weight_block_size": [128]}, r"weight_block_size is \[128\]"),
        (WAYS[0], None, {"fmt": "e5m2"}, r"fmt is 'e5m2'"),
        (WAYS[0], None, {"modules_to_not_convert": [LAYER]}, r"k_proj\.weight .* not quantized"),
    ],
)
def test_wrong_ones_are_refused_by_name_before_anything_is_started(
    tmp_path: Path,
    how: Float8,
    change: Callable[[dict[str, Tensor]], None] | None,
    config: dict[str, Any],
    said: str,
) -> None:
    folder = tmp_path / "coded"
    write_float8(folder, make_checkpoint(tmp_path / "dense", "llama"), how)
    if change is not None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit_quantization(folder, **config)
    with pytest.raises(InvalidRequest, match=said):
        require_servable(folder, parts=Parts.WEIGHTS, device="cpu")
