"""Towers of the families whose items differ in size: the rows of transformers, alone and packed together."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from services.families.family import ItemSize
from services.preprocess.media.processor_config import read_processor_config
from services.vision_encoder.devices.cpu.device import CpuDevice
from services.vision_encoder.loading import load_encoder
from services.vision_encoder.towers.encoder import BadPixels, Encoder, Item, pixel_item
from shared.artifacts.pixel_scaling import PixelScaling
from shared.checkpoint.folder import Checkpoint
from shared.cpu_kernels.binding import load_kernels
from shared.errors import InvalidRequest
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.vision_encoder import tower_engine

SIZES = [(64, 48), (56, 56), (300, 20), (4, 800), (800, 4), (113, 400), (57, 112), (500, 375)]
PLAIN = PixelScaling(1 / 255, (0.5,) * 3, (0.5,) * 3)
PROCESSORS = {
    "internvl_chat": GotOcr2ImageProcessorPil,
    "llava_next": LlavaNextImageProcessorPil,
    "qwen2_vl": Qwen2VLImageProcessorPil,
    "qwen2_5_vl": Qwen2VLImageProcessorPil,
}
TILED = ("internvl_chat", "llava_next")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Encoder:
    model = load_encoder(Checkpoint(folder), CpuDevice(dtype))
    assert model is not None
    return model


@pytest.fixture(params=tower_engine.ENGINES)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What computes."""
    tower_engine.choose(request.param, monkeypatch)
    return str(request.param)


def items_of(folder: Path, family: str, as_bytes: bool = False) -> list[Item]:
    """What preprocess makes of random pictures, as values or as bytes."""
    processor = PROCESSORS[family].from_dict(read_processor_config(folder))
    options: dict[str, Any] = {}
    scaling = None
    if as_bytes:
        scaling = PixelScaling.of(processor.to_dict(), 3)
        options = {"do_rescale": False, "do_normalize": False}
        if family not in TILED:
            options["temporal_patch_size"] = 1
    numbers = np.random.default_rng(2)
    items = []
    for width, height in SIZES:
        values = numbers.integers(0, 255, (height, width, 3), np.uint8)
        made = processor(images=PIL.Image.fromarray(values), return_tensors="np", **options)
        pixels = np.asarray(made["pixel_values"], np.uint8 if as_bytes else np.float32)
        if "image_grid_thw" in made:
            grid = tuple(made["image_grid_thw"][0].tolist())
            items.append(pixel_item(pixels, grid, height, width, scaling))
        else:
            tiles = pixels if "num_patches" in made else pixels[0]
            items.append(pixel_item(tiles, height=height, width=width, scaling=scaling))
    return items


def reference_rows(folder: Path, items: Sequence[Item]) -> list[torch.Tensor]:
    """The same from transformers, one item at a time."""
    model: Any = load_reference(folder)
    found = []
    with torch.inference_mode():
        for item in items:
            pixels = torch.from_numpy(item.pixels)
            if model.config.model_type == "internvl":
                made = model.get_image_features(
                    pixels, vision_feature_layer=model.config.vision_feature_layer, return_dict=True
                )
                found.append(made.pooler_output.flatten(0, 1))
                continue
            if item.grid == (0, 0, 0):
                made = model.get_image_features(
                    pixels[None],
                    torch.tensor([[item.height, item.width]]),
                    vision_feature_layer=model.config.vision_feature_layer,
                    vision_feature_select_strategy=model.config.vision_feature_select_strategy,
                    return_dict=True,
                )
            elif item.grid[0] > 1:
                made = model.get_video_features(pixels, torch.tensor([item.grid]), return_dict=True)
            else:
                made = model.get_image_features(pixels, torch.tensor([item.grid]), return_dict=True)
            found.append(made.pooler_output[0])
    return found


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llava_next", {"spelling": "old"}),
        ("llava_next", {"tower": "siglip", "spelling": "new"}),
        ("llava_next", {"config": {"vision_feature_layer": [-2, 1]}}),
        ("internvl_chat", {}),
        (
            "internvl_chat",
            {
                "language": "internlm2",
                "vision": {"attention_bias": False},
                "config": {"vision_feature_layer": -2},
            },
        ),
        (
            "internvl_chat",
            {"vision": {"norm_type": "rms_norm"}, "config": {"downsample_ratio": 0.25}},
        ),
        ("qwen2_vl", {"old_rope": True}),
        ("qwen2_vl", {"vision": {"patch_size": 8, "spatial_merge_size": 3}, "spelling": "new"}),
        ("qwen2_5_vl", {}),
        ("qwen2_5_vl", {"vision": {"fullatt_block_indexes": [], "window_size": 112}}),
    ],
)
def test_rows_are_those_of_transformers(
    tmp_path: Path, family: str, options: dict[str, Any], engine: str
) -> None:
    folder = make_checkpoint(tmp_path, family, **options)
    model, items = load(folder), items_of(folder, family)
    assert not model.stacked and model.uses_ops
    if family not in TILED:  # and videos: 3 steps of time
        side = 2 * options.get("vision", {}).get("spatial_merge_size", 2)
        values = np.random.default_rng(0).normal(size=(3 * side**2, items[0].pixels.shape[1]))
        items.append(pixel_item(values.astype(np.float32), (3, side, side)))
    assert all(model.cost(item) > 0 for item in items)
    expected = reference_rows(folder, items)
    together = model.encode(items)
    for item, ours, theirs in zip(items, together, expected, strict=True):
        assert ours.shape == theirs.shape and ours.shape[1] == model.hidden_size
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=5e-5)
        torch.testing.assert_close(model.encode([item])[0], ours, rtol=1e-5, atol=1e-5)
    for item, raw in zip(items, items_of(folder, family, as_bytes=True), strict=False):
        assert model.cost(raw) == model.cost(item)
        assert torch.equal(model.encode([raw])[0], model.encode([item])[0])
    assert model.encode([model.sample(ItemSize(224, 224))])[0].shape[1] == model.hidden_size


@pytest.mark.parametrize("family", PROCESSORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_give_the_same_bits_alone_and_together(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    folder = make_checkpoint(tmp_path, family)
    model, items = load(folder, dtype), items_of(folder, family)
    if load_kernels(1) is None:
        pytest.skip("there are no kernels for this machine")
    expected = reference_rows(folder, items)
    for item, ours, theirs in zip(items, model.encode(items), expected, strict=True):
        assert torch.equal(ours, model.encode([item])[0])
        assert (ours.float() - theirs).abs().max() < 0.05 * theirs.abs().max()


@pytest.mark.parametrize("family", ["llava_next", "qwen2_vl"])
def test_an_activation_that_the_kernels_do_not_have_is_left_to_torch(
    tmp_path: Path, family: str
) -> None:
    folder = make_checkpoint(tmp_path, family, vision={"hidden_act": "relu"})
    model, items = load(folder), items_of(folder, family)
    together, expected = model.encode(items), reference_rows(folder, items)
    for item, ours, theirs in zip(items, together, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=5e-5)
        assert torch.equal(ours, model.encode([item])[0])


def test_an_activation_that_nothing_here_has_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llava_next", config={"projector_hidden_act": "laplace"})
    with pytest.raises(InvalidRequest, match="laplace"):
        load(folder)


@pytest.mark.parametrize(
    ("family", "item"),
    [
        ("llava_next", pixel_item(np.zeros((3, 3, 56, 56), np.float32))),
        ("llava_next", pixel_item(np.zeros((3, 3, 56, 56), np.float32), height=112, width=112)),
        ("llava_next", pixel_item(np.zeros((3, 56, 56), np.float32), height=56, width=56)),
        ("internvl_chat", pixel_item(np.zeros((80, 3, 56, 56), np.float32))),
        ("internvl_chat", pixel_item(np.zeros((2, 3, 56, 28), np.float32), height=112, width=56)),
        ("internvl_chat", pixel_item(np.zeros((3, 56, 56), np.float32), height=56, width=56)),
        ("qwen2_vl", pixel_item(np.zeros((16, 1176), np.float32))),
        ("qwen2_vl", pixel_item(np.zeros((16, 1176), np.float32), (1, 4, 8))),
        ("qwen2_vl", pixel_item(np.zeros((9, 1176), np.float32), (1, 3, 3))),
        ("qwen2_vl", pixel_item(np.zeros((16, 1176), np.float32), (1, -4, -4))),
        ("qwen2_vl", pixel_item(np.zeros((16, 588), np.float32), (1, 4, 4))),
        ("qwen2_vl", pixel_item(np.zeros((16, 500), np.uint8), (1, 4, 4), scaling=PLAIN)),
    ],
)
def test_pixels_unlike_their_item_are_refused(tmp_path: Path, family: str, item: Item) -> None:
    with pytest.raises(BadPixels):
        load(make_checkpoint(tmp_path, family)).cost(item)


def test_a_newline_of_another_width_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_checkpoint(tmp_path, "llava_next")
    tensors = load_file(folder / "model.safetensors")
    tensors["image_newline"] = torch.zeros(7)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidRequest, match="image_newline"):
        load(folder)


def test_norms_of_all_queries_and_keys(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "internvl_chat", vision={"use_qk_norm": True})
    model, items = load(folder), items_of(folder, "internvl_chat")[:2]
    for ours, theirs in zip(model.encode(items), reference_rows(folder, items), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=5e-5)


def test_the_first_version_of_internvl_has_its_map_transposed(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "internvl_chat")
    items = items_of(folder, "internvl_chat")[:1]
    rows = load(folder).encode(items)[0]
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "ps_version": "v1"}))
    side = 2
    turned = rows.view(-1, side, side, rows.shape[1]).transpose(1, 2).flatten(0, 2)
    torch.testing.assert_close(load(folder).encode(items)[0], turned)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision": {"hidden_act": "relu"}}, "hidden_act"),
        ({"vision": {"norm_type": "batch_norm"}}, "norm_type"),
        ({"select_layer": -9}, "select_layer"),
        ({"force_image_size": 112}, "force_image_size"),
        ({"use_thumbnail": False}, "use_thumbnail"),
        ({"downsample_ratio": 0.3}, "downsample_ratio"),
    ],
)
def test_what_internvl_is_not_served_with_is_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = make_checkpoint(tmp_path, "internvl_chat")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["vision_config"] |= changes.pop("vision", {})
    path.write_text(json.dumps({**config, **changes}))
    with pytest.raises(InvalidRequest, match=message):
        load(folder)
