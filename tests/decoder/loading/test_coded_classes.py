"""Quantized checkpoints whose layers run by the code of transformers, such as models with experts: their layers are the
numbers that codes stand for."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.decoder.devices.base.ops import BaseOps
from services.families import registry
from services.families.check import Parts, require_servable
from services.families.family import load_part
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from tests.decoder.ranks.test_shares import LONGEST, Answer
from tests.support.checkpoints import make_checkpoint
from tests.support.checkpoints.ascend_codes import DESCRIPTION, NARROW, STATIC, write_ascend
from tests.support.checkpoints.bitsandbytes import BitsAndBytes
from tests.support.checkpoints.coded import (
    EVERY_LINEAR,
    Coded,
    edit_quantization,
    write_layers,
)
from tests.support.generic_models import make_generic_checkpoint

W4A8 = Coded("int-quantized", symmetric=True)
EXPERT = "model.layers.1.mlp.experts.2.down_proj"


def logits(folder: Path) -> Tensor:
    checkpoint = Checkpoint(folder)
    ops = BaseOps(torch.device("cpu"), torch.float32)
    with torch.inference_mode():
        kind = load_part(registry.find_decoder(checkpoint).decoder)
        return Answer(kind.load(checkpoint, ops, LONGEST), ops).logits


def same_logits(tmp_path: Path, tolerance: float = 0.0) -> None:
    require_servable(tmp_path / "coded", parts=Parts.WEIGHTS, device="cpu")
    found, expected = logits(tmp_path / "coded"), logits(tmp_path / "dense")
    assert expected.isfinite().all()
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("mixtral", marks=pytest.mark.full)])
def test_experts_in_4_bits_with_activations_in_8_of_compressed_tensors(
    tmp_path: Path, family: str
) -> None:
    dense = make_generic_checkpoint(tmp_path / "dense", family)
    names = write_layers(tmp_path / "coded", dense, W4A8.stored, W4A8.config(), EVERY_LINEAR)
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 32}
    activations = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    edit_quantization(tmp_path / "coded", config_groups={"group_0": scheme})
    assert sum(".experts." in name for name in names) == 4 * 8 * 3
    same_logits(tmp_path)


@pytest.mark.parametrize(
    ("kind", "group", "version"),
    [
        (NARROW, 32, "1.0.0"),
        pytest.param(NARROW, 0, "0", marks=pytest.mark.full),
        pytest.param(STATIC, 0, "1.0.0", marks=pytest.mark.full),
    ],
)
def test_experts_of_msmodelslim(tmp_path: Path, kind: str, group: int, version: str) -> None:
    dense = make_generic_checkpoint(tmp_path / "dense", "qwen3_moe")
    write_ascend(
        tmp_path / "coded", dense, kind, group=group, version=version, linears=EVERY_LINEAR
    )
    assert (tmp_path / "coded" / DESCRIPTION).is_file()
    same_logits(tmp_path, 2e-5)


@pytest.mark.parametrize(
    "family", ["gemma3", *(pytest.param(name, marks=pytest.mark.full) for name in ("qwen3_vl",))]
)
def test_models_with_pictures(tmp_path: Path, family: str) -> None:
    how = BitsAndBytes("nf4", nested=True, block=16)
    dense = make_checkpoint(tmp_path / "dense", family)
    write_layers(tmp_path / "coded", dense, how.stored, how.config(), EVERY_LINEAR)
    same_logits(tmp_path)


def change(folder: Path, name: str, value: Tensor) -> None:
    path = folder / "model.safetensors"
    save_file({**load_file(path), name: value}, path, {"format": "pt"})


def test_wrong_tensors_are_named(tmp_path: Path) -> None:
    dense = make_generic_checkpoint(tmp_path / "dense", "qwen3_moe")
    folder = tmp_path / "coded"
    write_layers(folder, dense, W4A8.stored, W4A8.config(), EVERY_LINEAR)
    scales = f"{EXPERT}.weight_scale"
    stored = load_file(folder / "model.safetensors")[scales]
    change(folder, scales, torch.full_like(stored, torch.nan))
    with pytest.raises(InvalidRequest, match=r"experts\.2\.down_proj\.weight_scale cannot be use"):
        logits(folder)
    change(folder, scales, stored[:-1].contiguous())
    with pytest.raises(InvalidRequest, match=r"experts\.2\.down_proj\.weight_scale .* it is F16"):
        require_servable(folder, parts=Parts.WEIGHTS, device="cpu")
    change(folder, scales, stored)
    codes = torch.full((64, 32), 9, dtype=torch.int8)
    change(folder, f"{EXPERT}.weight", codes)
    with pytest.raises(InvalidRequest, match=r"experts\.2\.down_proj\.weight cannot .* beyond -8"):
        logits(folder)


def test_codes_of_all_experts_in_one_tensor_are_refused(tmp_path: Path) -> None:
    dense = make_generic_checkpoint(tmp_path / "dense", "qwen3_moe")
    folder = tmp_path / "coded"
    write_layers(folder, dense, W4A8.stored, W4A8.config(), EVERY_LINEAR)
    change(folder, "model.layers.1.mlp.experts.down_proj", torch.ones(8, 64, 32).char())
    with pytest.raises(InvalidRequest, match=r"experts\.down_proj in I8 is of no linear layer"):
        require_servable(folder, parts=Parts.WEIGHTS, device="cpu")
