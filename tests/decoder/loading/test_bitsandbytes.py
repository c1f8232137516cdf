"""Checkpoints of bitsandbytes: read as they are declared, or refused by the tensor's name."""

import json
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
from tests.decoder.loading.test_quantization import TOLERANCE, loaded_with, log_probabilities
from tests.support.checkpoints import make_checkpoint
from tests.support.checkpoints.bitsandbytes import TABLES, BitsAndBytes, write_bitsandbytes
from tests.support.checkpoints.broken_layer import LAYER, removed, replaced
from tests.support.checkpoints.coded import edit_quantization

WAYS = [
    BitsAndBytes("nf4"),
    BitsAndBytes("nf4", nested=True),
    BitsAndBytes("nf4", nested=True, block=16),
    BitsAndBytes("fp4"),
    BitsAndBytes("int8"),
]
STATE = "weight.quant_state.bitsandbytes__nf4"


def written(tmp_path: Path, how: BitsAndBytes, family: str = "llama") -> dict[str, Tensor]:
    dense = make_checkpoint(tmp_path / "dense", family)
    return dict(write_bitsandbytes(tmp_path / "coded", dense, how))


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_layers_are_what_is_stored_and_nearly_so_as_codes(
    tmp_path: Path, how: BitsAndBytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.weights.readers.bitsandbytes._AT_ONCE", 500)  # a few rows
    numbers = written(tmp_path, how)
    require_servable(tmp_path / "coded", device="cpu")
    weights = Llama._weights(Checkpoint(tmp_path / "coded"))
    for name, expected in numbers.items():
        weight = weights.take_linear(name.removeprefix("model."), *expected.shape)
        off = weight.dense(torch.float32) - expected
        assert off.abs().max() <= 1e-6 * expected.abs().max()
        columns = weight.shard("in", [(16, 48)]).dense(torch.float32)
        assert torch.equal(columns, weight.dense(torch.float32)[:, 16:48])
        codes = weight.quantized()
        assert codes is not None
        expected_form = (8, 0) if how.kind == "int8" else (4, how.block)
        assert (codes.bits, codes.group) == expected_form
        # As far as whole numbers of a byte say the 16 of the table.
        near = 0.004 * codes.scales.float().abs().max() * max(codes.codebook or (1,))
        assert (codes.dequantize(torch.float32) - expected).abs().max() <= near
        rows = weight.shard("out", [(3, 13), (22, 31)]).quantized()
        assert rows is not None
        assert torch.equal(
            rows.dequantize(torch.float32),
            codes.dequantize(torch.float32)[[*range(3, 13), *range(22, 31)]],
        )


@pytest.mark.parametrize("kind", sorted(TABLES))
def test_a_table_of_whole_numbers_has_the_order_and_the_zero_of_its_own(
    tmp_path: Path, kind: str
) -> None:
    written(tmp_path, BitsAndBytes(kind))
    weights = Llama._weights(Checkpoint(tmp_path / "coded"))
    codes = weights.take_linear("layers.1.self_attn.k_proj", 32, 64).quantized()
    assert codes is not None and codes.codebook is not None
    whole, table = torch.tensor(codes.codebook).float(), torch.tensor(TABLES[kind])
    assert whole.abs().max() <= 127 and torch.equal(whole.sign(), table.sign())
    assert torch.equal(whole.argsort(stable=True), table.argsort(stable=True))


@pytest.mark.parametrize("how", [WAYS[1], WAYS[3], WAYS[4]], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_decoder_computes_with_them(tmp_path: Path, how: BitsAndBytes, family: str) -> None:
    written(tmp_path, how, family)
    expected = log_probabilities(loaded_with(tmp_path / "dense", "none", dtype="float32"))
    exact = log_probabilities(loaded_with(tmp_path / "coded", "none", dtype="float32"))
    assert torch.allclose(exact, expected, atol=1e-3)
    coded = log_probabilities(loaded_with(tmp_path / "coded", "auto", dtype="float32"))
    assert 0 < (coded - expected).abs().max() < 2 * TOLERANCE[8]


def test_layers_whose_outputs_end_inside_of_blocks_are_read_as_numbers(tmp_path: Path) -> None:
    dense = make_checkpoint(tmp_path / "dense", "llama", text={"intermediate_size": 96})
    numbers = write_bitsandbytes(tmp_path / "coded", dense, BitsAndBytes("nf4", block=64))
    weights = Llama._weights(require_servable(tmp_path / "coded", device="cpu"))
    for name in ("gate_proj", "down_proj"):
        expected = numbers[f"model.layers.0.mlp.{name}"]
        weight = weights.take_linear(f"layers.0.mlp.{name}", *expected.shape)
        assert weight.is_coded == (name == "gate_proj")
        part = weight.shard("out", [(1, 8), (31, 62)]).dense(torch.float32)
        assert torch.equal(part, expected[[*range(1, 8), *range(31, 62)]])
    expected = log_probabilities(loaded_with(dense, "none", dtype="float32"))
    coded = log_probabilities(loaded_with(tmp_path / "coded", "auto", dtype="float32"))
    assert (coded - expected).abs().max() < 2 * TOLERANCE[8]


def test_codes_count_as_the_numbers_that_they_are(tmp_path: Path) -> None:
    """Which decides about the element type, and about how many threads compute."""
    written(tmp_path, WAYS[0])
    numbers, codes = (Checkpoint(tmp_path / name).num_parameters for name in ("dense", "coded"))
    assert numbers < codes < 1.05 * numbers  # scales are numbers too


def test_an_older_configuration_does_not_name_the_method(tmp_path: Path) -> None:
    written(tmp_path, WAYS[0])
    path = tmp_path / "coded" / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]["quant_method"]
    path.write_text(json.dumps(config))
    require_servable(tmp_path / "coded", parts=Parts.WEIGHTS, device="cpu")


def said(**changes: object) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        state = json.loads(bytes(tensors[f"{LAYER}.{STATE}"].numpy())) | changes
        tensors[f"{LAYER}.{STATE}"] = torch.tensor(list(json.dumps(state).encode())).byte()

    return change


@pytest.mark.parametrize(
    ("how", "change", "config", "expected"),
    [
        (WAYS[0], removed(STATE), {}, rf"k_proj\.{STATE} cannot be used: the checkpoint lacks it"),
        (WAYS[0], removed("weight.absmax"), {}, r"k_proj\.weight\.absmax .* lacks it"),
        (WAYS[0], removed("weight"), {}, r"k_proj\.weight cannot be used: the checkpoint lacks it"),
        (WAYS[1], removed("weight.nested_absmax"), {}, r"weight\.nested_absmax .* lacks it"),
        (WAYS[0], said(shape=[64, 32]), {}, r"wants \[32, 64\] .* stored is \[64, 32\]"),
        (WAYS[0], said(shape=[32, 64, 1]), {}, rf"{STATE} cannot be used: it does not say how"),
        (WAYS[0], said(shape=["32", 64]), {}, rf"{STATE} cannot be used: it says \['32', 64, 32\]"),
        (WAYS[0], said(shape=None), {}, rf"{STATE} cannot be used: it does not say how"),
        (WAYS[0], said(blocksize=128), {}, r"absmax .*: it is F32 \[64\] and has to be F32 \[16\]"),
        (WAYS[0], said(blocksize=0), {}, rf"{STATE} cannot be used: it says"),
        (WAYS[0], said(quant_type="fp4"), {}, rf"{STATE} cannot be used: it says 'fp4'"),
        (WAYS[1], said(nested_blocksize=-1), {}, rf"{STATE} cannot be used: it says -1 scales"),
        (WAYS[1], said(nested_offset="nan"), {}, rf"{STATE} cannot be used: it says"),
        (WAYS[0], replaced(STATE, torch.zeros(9000).byte()), {}, "has to be a few bytes"),
        (WAYS[0], replaced(STATE, torch.zeros(90).byte()), {}, "it does not say how the layer"),
        (WAYS[4], removed("SCB"), {}, r"k_proj\.SCB cannot be used: the checkpoint lacks it"),
        (
            WAYS[4],
            replaced("weight_format", torch.tensor(2).byte()),
            {},
            r"weight_format .*by rows",
        ),
        (WAYS[0], None, {"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage is 'bf"),
        (WAYS[0], None, {"bnb_4bit_quant_type": "nf3"}, "bnb_4bit_quant_type is 'nf3'"),
        (WAYS[0], None, {"load_in_4bit": False}, "neither load_in_4bit nor load_in_8bit is true"),
        (WAYS[0], None, {"llm_int8_skip_modules": [LAYER]}, "says that it is not quantized"),
    ],
)
def test_wrong_ones_are_refused_by_name_before_anything_is_started(
    tmp_path: Path,
    how: BitsAndBytes,
    change: Callable[[dict[str, Tensor]], None] | None,
    config: dict[str, Any],
    expected: str,
) -> None:
    written(tmp_path, how)
    folder = tmp_path / "coded"
    if change is not None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit_quantization(folder, **config)
    with pytest.raises(InvalidRequest, match=expected):
        require_servable(folder, parts=Parts.WEIGHTS, device="cpu")


@pytest.mark.parametrize(
    ("how", "part"),
    [
        (WAYS[0], "weight.absmax"),
        (WAYS[1], "weight.nested_absmax"),
        (WAYS[4], "SCB"),
        (WAYS[0], "weight.quant_map"),
    ],
)
def test_scales_and_tables_that_are_none_are_refused_when_they_are_read(
    tmp_path: Path, how: BitsAndBytes, part: str
) -> None:
    written(tmp_path, how)
    path = tmp_path / "coded" / "model.safetensors"
    tensors = load_file(path)
    tensors[f"{LAYER}.{part}"][0] = torch.nan
    save_file(tensors, path, {"format": "pt"})
    for quantization in ("auto", "none"):
        shown = part if part != "weight.nested_absmax" else "weight.absmax"
        with pytest.raises(InvalidRequest, match=rf"k_proj\.{shown} cannot be used: it"):
            loaded_with(tmp_path / "coded", quantization)
