"""Checkpoints whose encoder and projector are quantized too: rows are those of the numbers that codes stand for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.families.check import Parts, require_servable
from services.families.family import ItemSize
from services.vision_encoder.devices.cpu.device import CpuDevice
from services.vision_encoder.loading import load_encoder
from services.vision_encoder.towers.encoder import Encoder
from shared.checkpoint.content import content_digest
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from tests.support.checkpoints import make_checkpoint
from tests.support.checkpoints.ascend_codes import NARROW, STATIC, write_ascend
from tests.support.checkpoints.bitsandbytes import BitsAndBytes
from tests.support.checkpoints.coded import (
    EVERY_LINEAR,
    Coded,
    edit_quantization,
    write_layers,
)
from tests.support.checkpoints.float4 import Float4
from tests.support.checkpoints.float8 import Float8

SIZES = {"hidden_size": 64, "intermediate_size": 96}
QWEN = {"depth": 2, "fullatt_block_indexes": [1], **SIZES}
Tensors = dict[str, Tensor]


class Way(Protocol):
    """How layers are stored."""

    def config(self) -> dict[str, Any]:
        """What config.json says."""

    def stored(self, weight: Tensor, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        """By the last part of the name, and the numbers in float32."""


WAYS: list[Way] = [
    BitsAndBytes("nf4", nested=True),
    BitsAndBytes("fp4", block=64),  # one is of two outputs, where these have 96 inputs
    BitsAndBytes("int8"),
    Coded("awq"),
    Coded("gptq", symmetric=True, ordered=True),
    Coded("pack-quantized"),
    Coded("int-quantized", bits=8, group=0, symmetric=True),
    Float8("fp8"),
    Float8("fbgemm_fp8", None),
    Float8("compressed-tensors", None),
    Float8("modelopt", None, one_scale=True, scalar=True),
    Float4("nvfp4"),
    Float4("mxfp4", "auto-round"),
]


def written(
    tmp_path: Path, how: Way, family: str = "qwen2_5_vl", **options: Any
) -> dict[str, Tensor]:
    """Folders "coded" and "dense"; the numbers of the encoder's layers."""
    options = {"vision": QWEN if family == "qwen2_5_vl" else SIZES, **options}
    dense = make_checkpoint(tmp_path / "dense", family, **options)
    numbers = write_layers(tmp_path / "coded", dense, how.stored, how.config(), EVERY_LINEAR)
    return {name: value for name, value in numbers.items() if "layers" not in name}


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Encoder:
    model = load_encoder(Checkpoint(folder), CpuDevice(dtype))
    assert model is not None
    return model


def rows(folder: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    model = load(folder, dtype)
    item = model.sample(ItemSize(80, 60))
    values = next(iter(item.tensors.values()))
    drawn = torch.randn(values.shape, generator=torch.Generator().manual_seed(0))
    values[...] = drawn.numpy()
    return model.encode([item])[0]


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_rows_are_those_of_the_numbers(tmp_path: Path, how: Way) -> None:
    assert len(written(tmp_path, how)) == 2 + 2 * 5
    require_servable(tmp_path / "coded", parts=Parts.WEIGHTS, device="cpu")
    found, expected = rows(tmp_path / "coded"), rows(tmp_path / "dense")
    # The numbers of codes with a scale are rounded once, which the test's own are as well.
    if isinstance(how, Float4):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize(("kind", "group"), [(STATIC, 0), (NARROW, 32)])
def test_rows_are_those_of_the_numbers_of_msmodelslim(
    tmp_path: Path, kind: str, group: int
) -> None:
    dense = make_checkpoint(tmp_path / "dense", "qwen2_5_vl", vision=QWEN)
    names = write_ascend(tmp_path / "coded", dense, kind, group=group, linears=EVERY_LINEAR)
    assert sum(name.startswith("visual.") for name in names) == 2 + 2 * 5
    require_servable(tmp_path / "coded", parts=Parts.WEIGHTS, device="cpu")
    torch.testing.assert_close(
        rows(tmp_path / "coded"), rows(tmp_path / "dense"), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("how", [WAYS[0], WAYS[3], WAYS[6], WAYS[8]], ids=str)
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llava", {"spelling": "old"}),
        pytest.param("llava", {"tower": "siglip", "spelling": "new"}, marks=pytest.mark.full),
        pytest.param("llava_next", {}, marks=pytest.mark.full),
        ("internvl_chat", {}),  # whose layers are multiplied by factors
        pytest.param("qwen2_vl", {"vision": {"embed_dim": 64}}, marks=pytest.mark.full),
    ],
)
def test_towers_of_all_kinds(
    tmp_path: Path, how: Way, family: str, options: dict[str, Any]
) -> None:
    written(tmp_path, how, family, **options)
    require_servable(tmp_path / "coded", parts=Parts.WEIGHTS, device="cpu")
    assert torch.equal(rows(tmp_path / "coded"), rows(tmp_path / "dense"))


def test_in_16_bits_they_are_the_numbers_rounded_once(tmp_path: Path) -> None:
    written(tmp_path, WAYS[0])
    found, expected = (rows(tmp_path / name, torch.bfloat16) for name in ("coded", "dense"))
    assert torch.equal(found, expected)


def test_the_encoder_may_say_by_itself_how_it_is_stored(tmp_path: Path) -> None:
    how = Coded("int-quantized", bits=8, group=0, symmetric=True)
    written(tmp_path, how)
    path = tmp_path / "coded" / "config.json"
    config = json.loads(path.read_text())
    config["vision_config"]["quantization_config"] = config.pop("quantization_config")
    path.write_text(json.dumps(config))
    with pytest.raises(InvalidRequest, match="weight_scale is of a quantized layer"):
        require_servable(tmp_path / "coded", parts=Parts.WEIGHTS, device="cpu")
    coded, dense = (load_file(tmp_path / name / "model.safetensors") for name in ("coded", "dense"))
    mixed = {name: value for name, value in coded.items() if name.startswith("visual")}
    mixed |= {name: value for name, value in dense.items() if not name.startswith("visual")}
    save_file(mixed, tmp_path / "coded" / "model.safetensors", {"format": "pt"})
    require_servable(tmp_path / "coded", parts=Parts.WEIGHTS, device="cpu")
    assert torch.equal(rows(tmp_path / "coded"), rows(tmp_path / "dense"))


def test_embeddings_of_codes_are_other_content_than_those_of_numbers(tmp_path: Path) -> None:
    """By which cached rows are told apart, also where the same codes stand for other numbers."""
    written(tmp_path, Coded("gptq"))
    digests = [content_digest(Checkpoint(tmp_path / name)) for name in ("coded", "dense")]
    edit_quantization(tmp_path / "coded", checkpoint_format="gptq_v2")
    digests.append(content_digest(Checkpoint(tmp_path / "coded")))
    assert len(set(digests)) == 3


LAYER = "visual.blocks.1.mlp.down_proj"


def without(part: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        del tensors[f"{LAYER}.{part}"]

    return change


def replaced(part: str, make: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[f"{LAYER}.{part}"] = make(tensors[f"{LAYER}.{part}"]).contiguous()

    return change


def infinite(values: Tensor) -> Tensor:
    return torch.full_like(values, torch.inf)


HEADERS: list[tuple[Way, Callable[[Tensors], None], str]] = [
    (WAYS[3], without("scales"), r"down_proj\.scales cannot be used: the checkpoint lacks it"),
    (WAYS[3], replaced("qzeros", Tensor.byte), r"down_proj\.qzeros cannot be used: it is U8"),
    (WAYS[4], replaced("g_idx", torch.zeros_like), r"g_idx .* groups have not 32 inputs each"),
    (WAYS[0], replaced("weight", lambda t: t[:-1]), r"down_proj\.weight cannot .* it is U8 \[3071"),
    (WAYS[0], without("weight.absmax"), r"down_proj\.weight\.absmax .* lacks it"),
    (WAYS[2], replaced("SCB", lambda t: t[:-1]), r"down_proj\.SCB cannot be used: it is F32 \[63"),
    (WAYS[7], replaced("weight_scale_inv", lambda t: t.T), r"down_proj\.weight_scale_inv cannot"),
]
CONTENT: list[tuple[Way, Callable[[Tensors], None], str]] = [
    (WAYS[0], replaced("weight.nested_absmax", infinite), r"down_proj\.weight\.absmax cannot be u"),
    (WAYS[2], replaced("SCB", infinite), r"down_proj\.SCB cannot be used"),
    (WAYS[3], replaced("scales", infinite), r"down_proj\.scales cannot be used"),
    (WAYS[6], replaced("weight_scale", infinite), r"down_proj\.weight_scale cannot be used"),
    (WAYS[8], replaced("weight_scale", infinite), r"down_proj\.weight_scale cannot be used"),
    # Sizes are those of the tower's code.
    (WAYS[6], replaced("weight", lambda t: t[:, :-1]), r"wants \[64, 96\] .* stored is \[64, 95\]"),
]


def broken(tmp_path: Path, how: Way, change: Callable[[Tensors], None]) -> Path:
    written(tmp_path, how)
    path = tmp_path / "coded" / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})
    return path.parent


@pytest.mark.parametrize(("how", "change", "said"), HEADERS)
def test_wrong_tensors_are_refused_by_name_before_anything_is_started(
    tmp_path: Path, how: Way, change: Callable[[Tensors], None], said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said):
        require_servable(broken(tmp_path, how, change), parts=Parts.WEIGHTS, device="cpu")


@pytest.mark.parametrize(("how", "change", "said"), CONTENT)
def test_wrong_content_is_refused_by_name_when_it_is_read(
    tmp_path: Path, how: Way, change: Callable[[Tensors], None], said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said):
        load(broken(tmp_path, how, change))
