"""How many placeholders a picture takes, against transformers' own processors over hundreds of sizes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from services.families import registry
from services.families.family import ItemSize, load_part
from services.preprocess.media.image_limits import ImageLimits, UnreadableImage
from services.preprocess.media.processor_config import read_processor_config
from services.preprocess.prompt.prompt_rule import ImageProcessing, PromptRule
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from tests.support.checkpoints import make_checkpoint, reference_inputs

LIMITS = ImageLimits(max_pixels=50_000_000)
# Beside what is drawn: squares, lines, one pixel more and less than a whole number of patches.
SIZES = [(4, 4), (4, 800), (800, 4), (56, 56), (57, 112), (111, 56), (28, 28), (27, 29), (14, 15)]


def sizes(count: int, largest: int = 3000) -> list[tuple[int, int]]:
    """(width, height) of pictures that are taken, half of them of extreme proportions."""
    numbers = np.random.default_rng(11)
    found = list(SIZES)
    while len(found) < count:
        exponents = numbers.uniform(np.log(4), np.log(largest), 2)
        width, height = (int(x) for x in np.exp(exponents))
        try:
            LIMITS.check(width, height)
        except UnreadableImage:
            continue
        found.append((width, height))
    return found


def rule_of(folder: Path, processor: Any) -> PromptRule:
    checkpoint = Checkpoint(folder)
    rule_class = load_part(registry.find(checkpoint).prompt)
    pixels = processor(images=PIL.Image.new("RGB", (64, 48)), return_tensors="np")["pixel_values"]
    processing = ImageProcessing(processor.to_dict(), pixels[0].shape)
    rule: PromptRule = rule_class(checkpoint, processing)
    return rule


@pytest.mark.parametrize(
    ("tower", "vision", "resolutions"),
    [
        ("clip", {}, None),
        ("siglip", {}, None),
        ("clip", {"image_size": 42}, [[42, 42], [42, 84], [126, 42], [84, 126]]),
        ("clip", {"image_size": 70}, [[70 * i, 70 * j] for i in range(1, 5) for j in range(1, 5)]),
    ],
)
def test_llava_next_counts_are_those_of_transformers(
    tmp_path: Path, tower: str, vision: dict[str, Any], resolutions: list[list[int]] | None
) -> None:
    from transformers import LlavaNextProcessor

    config = {"image_grid_pinpoints": resolutions} if resolutions else {}
    make_checkpoint(tmp_path, "llava_next", tower=tower, vision=vision, config=config)
    processor = LlavaNextProcessor.from_pretrained(tmp_path)
    rule = rule_of(tmp_path, processor.image_processor)
    drawn = sizes(400)
    expected = processor._get_num_multimodal_tokens([(height, width) for width, height in drawn])
    found = [rule.span(ItemSize(*size)) for size in drawn]
    assert [span.rows for span in found] == expected.num_image_tokens
    assert all(len(span.token_ids) == span.rows for span in found)
    target = rule.updates()[0].target
    assert isinstance(target, tuple)
    for size in drawn[:12]:
        ids = reference_inputs(tmp_path, "<image>", [PIL.Image.new("RGB", size)])["input_ids"]
        assert int(np.isin(ids, target).sum()) == rule.span(ItemSize(*size)).rows


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": {"vision_feature_select_strategy": "full"}}, "no map"),
        ({"config": {"image_grid_pinpoints": [[56, 57]]}}, "no multiples"),
    ],
)
def test_an_impossible_llava_next_is_refused_at_start(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    from transformers.models.llava_next.image_processing_pil_llava_next import (
        LlavaNextImageProcessorPil,
    )

    make_checkpoint(tmp_path, "llava_next", **options)
    config = read_processor_config(tmp_path)
    config["image_grid_pinpoints"] = [[56, 56]]
    with pytest.raises(InvalidRequest, match=message):
        rule_of(tmp_path, LlavaNextImageProcessorPil.from_dict(config))


def test_model_and_processor_of_llava_next_must_agree(tmp_path: Path) -> None:
    from transformers.models.llava_next.image_processing_pil_llava_next import (
        LlavaNextImageProcessorPil,
    )

    make_checkpoint(tmp_path, "llava_next")
    config = {**read_processor_config(tmp_path), "image_grid_pinpoints": [[56, 112]]}
    with pytest.raises(InvalidRequest, match="preprocessor_config"):
        rule_of(tmp_path, LlavaNextImageProcessorPil.from_dict(config))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"old_rope": True},
        {"images": {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}}},
        {"images": {"min_pixels": 256 * 28 * 28, "max_pixels": 300 * 28 * 28}},
        {"vision": {"patch_size": 8, "spatial_merge_size": 3}},
    ],
)
def test_qwen2_vl_grids_are_those_of_transformers(tmp_path: Path, options: dict[str, Any]) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    make_checkpoint(tmp_path, "qwen2_vl", **options)
    processor = Qwen2VLImageProcessorPil.from_dict(read_processor_config(tmp_path))
    rule = rule_of(tmp_path, processor)
    merged = processor.merge_size**2
    for width, height in sizes(400):
        span = rule.span(ItemSize(width, height))
        assert span.rows * merged == processor.get_number_of_image_patches(height, width)
        assert span.rows * merged == np.prod(span.grid) and len(span.token_ids) == span.rows
    for width, height in sizes(40)[-20:]:
        if width * height < 200_000:
            picture = PIL.Image.new("RGB", (width, height))
            made = processor(images=picture, return_tensors="np")
            assert tuple(made["image_grid_thw"][0]) == rule.span(ItemSize(width, height)).grid


def test_tower_and_processor_of_qwen2_vl_must_agree(tmp_path: Path) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    make_checkpoint(tmp_path, "qwen2_vl", images={"merge_size": 4})
    processor = Qwen2VLImageProcessorPil.from_dict(read_processor_config(tmp_path))
    with pytest.raises(InvalidRequest, match="merges 4"):
        rule_of(tmp_path, processor)


@pytest.mark.parametrize("tiles", [(1, 6), (1, 12), (2, 5), (3, 3), (1, 1)])
def test_internvl_tiles_are_those_of_transformers(tmp_path: Path, tiles: tuple[int, int]) -> None:
    make_checkpoint(tmp_path, "internvl_chat")
    path = tmp_path / "config.json"
    bounds = dict(zip(("min_dynamic_patch", "max_dynamic_patch"), tiles, strict=True))
    path.write_text(json.dumps({**json.loads(path.read_text()), **bounds}))
    processor = GotOcr2ImageProcessorPil.from_dict(read_processor_config(tmp_path))
    rule = rule_of(tmp_path, processor)
    for width, height in sizes(400):
        count = processor.get_number_of_image_patches(height, width)
        assert rule.span(ItemSize(width, height)).rows == 4 * count
    for width, height in sizes(30)[-12:]:
        picture = PIL.Image.new("RGB", (width, height))
        ids = reference_inputs(tmp_path, "<img>", [picture])["input_ids"][0].tolist()
        span = rule.span(ItemSize(width, height))
        assert tuple(ids) == span.token_ids and span.embed_runs == ((1, span.rows),)
        assert len(processor(images=picture, return_tensors="np")["pixel_values"]) * 4 == span.rows


@pytest.mark.parametrize(("width", "height"), [(1, 100), (100, 3), (4, 801), (1000, 4)])
def test_too_narrow_images_are_refused_for_every_family(width: int, height: int) -> None:
    with pytest.raises(UnreadableImage):
        LIMITS.check(width, height)
