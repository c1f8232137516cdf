"""Pixels stored as uint8 give bit for bit the values of transformers' image processors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.efficientnet.image_processing_pil_efficientnet import (
    EfficientNetImageProcessorPil,
)
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from services.preprocess.media import early_resize
from services.preprocess.media.processor_config import read_processor_config
from shared.artifacts.pixel_scaling import PixelScaling
from shared.artifacts.store import ArtifactReader
from tests.support.checkpoints import make_checkpoint
from tests.support.preprocess.pixels import pixel_values
from tests.support.preprocess.service import PreprocessMaker, file_of, image, picture, turn
from tests.support.vision_checkpoints import llava_checkpoint

# Sides that divide evenly and sides that do not, up and down, wide and tall.
SIZES = [(336, 336), (56, 56), (61, 97), (97, 61), (640, 48), (20, 300), (1001, 747), (57, 113)]
SMALL = {"shortest_edge": 56 * 56, "longest_edge": 20 * 28 * 28}


@pytest.mark.parametrize(
    ("family", "processor"),
    [("llava_next", LlavaNextImageProcessorPil), ("qwen2_vl", Qwen2VLImageProcessorPil)],
)
async def test_pixels_are_bit_equal_to_the_processors(
    family: str, processor: Any, tmp_path: Path, make_preprocess: PreprocessMaker
) -> None:
    folder = make_checkpoint(tmp_path, family)
    reference = processor.from_dict(read_processor_config(folder))
    async with make_preprocess(folder) as service:
        for number, size in enumerate(SIZES):
            seen = picture(*size, seed=number)
            item = (await service.chat(turn("user", image(file_of(seen))))).media[0]
            expected = np.asarray(reference(images=seen, return_tensors="np")["pixel_values"])
            expected = expected if family == "qwen2_vl" else expected[0]
            np.testing.assert_array_equal(await pixel_values(item), expected)


@pytest.mark.parametrize(
    "settings",
    [
        {"do_rescale": False},
        {"do_normalize": False},
        {"image_mean": 0.5, "image_std": 0.25, "rescale_factor": 1 / 127.5},
        {"image_mean": [0.1, 0.2, 0.3], "image_std": [1.5, 0.7, 0.01]},
    ],
)
def test_the_scaling_table_equals_the_processors_arithmetic(settings: dict[str, Any]) -> None:
    every = np.arange(16 * 16 * 3, dtype=np.uint8).reshape(16, 16, 3)
    processor = SiglipImageProcessorPil(do_resize=False, **settings)
    made = processor(images=PIL.Image.fromarray(every), return_tensors="np")["pixel_values"][0]
    table = PixelScaling.of(processor.to_dict(), 3).table()
    found = np.stack([table[channel][every[:, :, channel]] for channel in range(3)])
    assert table.dtype == np.float32
    np.testing.assert_array_equal(found, made)


async def test_pixels_that_bytes_cannot_represent_are_stored_as_float32(
    tmp_path: Path, make_preprocess: PreprocessMaker
) -> None:
    """A processor whose last steps are others: here it takes one away after rescaling."""
    folder = llava_checkpoint(tmp_path)
    config = json.loads((folder / "processor_config.json").read_text())
    size = {"height": 56, "width": 56}
    processor = EfficientNetImageProcessorPil(size=size, rescale_offset=True, do_center_crop=False)
    config["image_processor"] = processor.to_dict()
    (folder / "processor_config.json").write_text(json.dumps(config))
    seen = picture(80, 60)
    async with make_preprocess(folder) as service:
        item = (await service.chat(turn("user", image(file_of(seen))))).media[0]
        reader = ArtifactReader()
        pixels = np.array(await reader.open(item.pixels))
        await reader.close()
    assert not item.HasField("scaling") and pixels.dtype == np.float32
    expected = processor(images=seen, return_tensors="np")["pixel_values"][0]
    np.testing.assert_array_equal(pixels, expected)


@pytest.mark.parametrize(
    "processor",
    [
        SiglipImageProcessorPil(size={"height": 48, "width": 64}),
        CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}),
        CLIPImageProcessorPil(size={"shortest_edge": 61}, crop_size={"height": 80, "width": 80}),
        Qwen2VLImageProcessorPil(size=SMALL),
    ],
)
def test_resizing_early_changes_no_bit(processor: Any) -> None:
    early = 0
    for number, size in enumerate(SIZES):
        seen = picture(*size, seed=number)
        small = early_resize.resize(processor, seen)
        early += small is not seen
        ours, theirs = (
            processor(images=one, return_tensors="np")["pixel_values"] for one in (small, seen)
        )
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    assert early >= len(SIZES) - 2


@pytest.mark.parametrize(
    "processor",
    [
        SiglipImageProcessorPil(do_resize=False),
        SiglipImageProcessorPil(size={"max_height": 40, "max_width": 40}),
        LlavaNextImageProcessorPil(),
    ],
)
def test_unknown_processors_resize_by_themselves(processor: Any) -> None:
    seen = picture(80, 60)
    assert early_resize.resize(processor, seen) is seen
