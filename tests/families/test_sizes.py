"""The largest item of a family: prompt rule, encoder and record agree on it, and nothing is larger."""

from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from services.families import registry
from services.families.family import ItemSize, load_part
from services.preprocess.media.processor_config import read_processor_config, read_video_size
from services.preprocess.prompt.prompt_rule import ImageProcessing, PromptRule
from services.vision_encoder.devices.cpu.device import CpuDevice
from services.vision_encoder.loading import load_encoder
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.processor import image_processor_class, image_processor_name
from tessera.common.v1.media_pb2 import Modality
from tests.support.checkpoints import make_checkpoint

GRIDS = [[56, 56], [56, 112], [112, 56], [112, 112], [168, 56]]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("internvl_chat", {}),
    ("llava", {}),
    ("llava", {"tower": "siglip"}),
    ("llava_next", {}),
    ("llava_next", {"config": {"image_grid_pinpoints": GRIDS}}),
    ("qwen2_vl", {}),
    ("qwen2_vl", {"images": {"min_pixels": 4 * 28 * 28, "max_pixels": 300 * 28 * 28}}),
    ("qwen2_5_vl", {"vision": {"patch_size": 8, "spatial_merge_size": 3}}),
]


def rule_of(checkpoint: Checkpoint) -> PromptRule:
    """As preprocess makes it."""
    config = read_processor_config(checkpoint.folder)
    processor = image_processor_class(image_processor_name(config)).from_dict(config)
    made = processor(images=PIL.Image.new("RGB", (64, 48)), return_tensors="np")["pixel_values"]
    settings = {key: value for key, value in processor.to_dict().items() if value is not None}
    if "temporal_patch_size" in settings:
        settings["video_size"] = read_video_size(checkpoint.folder) or settings["size"]
    rule: PromptRule = load_part(registry.find(checkpoint).prompt)(
        checkpoint, ImageProcessing(settings, made[0].shape)
    )
    return rule


@pytest.mark.parametrize(("family", "options"), CASES)
def test_the_largest_item_takes_most_tokens_and_as_many_rows(
    tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    checkpoint = Checkpoint(make_checkpoint(tmp_path, family, **options))
    rule, found = rule_of(checkpoint), registry.find(checkpoint)
    assert set(found.modalities) == set(rule.limits)
    size = found.largest(checkpoint, Modality.MODALITY_IMAGE)
    assert size.frames == 0
    span = rule.span(size)
    assert len(span.token_ids) == size.tokens
    numbers = np.random.default_rng(5)
    for _ in range(400):
        width, height = np.exp(numbers.uniform(np.log(28), np.log(3000), 2)).astype(int).tolist()
        if max(width, height) <= 20 * min(width, height):
            assert len(rule.span(ItemSize(width, height)).token_ids) <= size.tokens
    encoder = load_encoder(checkpoint, CpuDevice(torch.float32))
    assert encoder is not None
    item = encoder.sample(size)
    assert encoder.cost(item) > 0 and item.grid == span.grid
    assert len(encoder.encode([item])[0]) == span.rows


def test_the_largest_video_is_as_long_as_its_processor_takes(tmp_path: Path) -> None:
    checkpoint = Checkpoint(make_checkpoint(tmp_path, "qwen2_vl"))
    size = registry.find(checkpoint).largest(checkpoint, Modality.MODALITY_VIDEO)
    span = rule_of(checkpoint).span(size)
    assert size.frames == (checkpoint.video_processor_config.get("max_frames") or 768)
    assert len(span.token_ids) == size.tokens == span.rows and span.grid[0] == -(-size.frames // 2)
