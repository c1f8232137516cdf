"""Qwen2-VL and Qwen2.5-VL: small patches, at most 40 rows an image, the released checkpoints' tokens."""

import json
import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.support.checkpoints.options import CheckpointOptions, load_config, text_sizes
from tests.support.decoder.mrope import Grid, published_positions

IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
TOKENS = ["<|vision_start|>", "<|vision_end|>", IMAGE, VIDEO]
# As the released checkpoints write it, without their numbered pictures.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' or 'video' in content %}"
    "<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build(
    chosen: CheckpointOptions, words: PreTrainedTokenizerFast, newer: bool = False
) -> tuple[Qwen2VLForConditionalGeneration | Qwen2_5_VLForConditionalGeneration, "Parts"]:
    """The model, not yet randomised, and what its folder needs beside it."""
    words.add_special_tokens({"extra_special_tokens": TOKENS})
    words.chat_template = CHAT_TEMPLATE
    text = {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [2, 3, 3],
        },
        **text_sizes(chosen, words),
    }
    vision: dict[str, Any] = {"depth": 3, "num_heads": 4, "patch_size": 14, "spatial_merge_size": 2}
    if newer:
        vision |= {
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": text["hidden_size"],
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        }
    else:
        vision |= {"embed_dim": 32, "hidden_size": text["hidden_size"], "mlp_ratio": 2}
    kind, model = (
        (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration)
        if newer
        else (Qwen2VLConfig, Qwen2VLForConditionalGeneration)
    )
    start, end, image, video = words.convert_tokens_to_ids(TOKENS)
    config = kind(
        text_config=text,
        vision_config={**vision, **chosen.vision},
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=bool(text.get("tie_word_embeddings")),
        **chosen.config,
    )
    images = Qwen2VLImageProcessorPil(
        **{
            "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 40},
            "patch_size": config.vision_config.patch_size,
            "merge_size": config.vision_config.spatial_merge_size,
            **chosen.images,
        }
    )
    return model(config), Parts(images, words)


class Parts:
    """Image processor and tokenizer, as separate files."""

    def __init__(self, images: Qwen2VLImageProcessorPil, words: PreTrainedTokenizerFast) -> None:
        self._images = images
        self._words = words

    def save_pretrained(self, folder: Path) -> None:
        """Writes both."""
        self._images.save_pretrained(folder)
        self._words.save_pretrained(folder)


def inputs(
    folder: Path,
    text: str,
    images: Sequence[Image],
    videos: Sequence[tuple[Sequence[Image], float]] = (),
) -> dict[str, torch.Tensor]:
    """What `generate` takes, from a rendered prompt. Videos are frames with the seconds between them."""
    words = PreTrainedTokenizerFast.from_pretrained(folder)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    processor = Qwen2VLImageProcessorPil.from_dict(settings)
    config = load_config(folder)
    found: dict[str, Any] = {}
    if images:
        made = processor(images=list(images), return_tensors="pt")
        found = {"pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"]}
        text = _expanded(text, IMAGE, made["image_grid_thw"], processor.merge_size)
    if videos:
        values, grids = zip(*(_video(processor, frames) for frames, _ in videos), strict=True)
        found["pixel_values_videos"] = torch.cat(values)
        found["video_grid_thw"] = torch.tensor(grids)
        text = _expanded(text, VIDEO, found["video_grid_thw"], processor.merge_size)
        if config["model_type"] == "qwen2_5_vl":
            paces = [pace * processor.temporal_patch_size for _, pace in videos]
            found["second_per_grid_ts"] = torch.tensor(paces)
    ids = words(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    found["input_ids"] = ids
    kinds = (ids == config["image_token_id"]).int(), (ids == config["video_token_id"]).int()
    found["mm_token_type_ids"] = kinds[0] + 2 * kinds[1]
    if videos:
        found["position_ids"] = _positions(found, config)
    return found


def _positions(found: dict[str, torch.Tensor], config: dict[str, Any]) -> torch.Tensor:
    """Positions [3, 1, tokens] by the published rule, which `generate` takes instead of its own."""
    vision = config["vision_config"]
    merge, speed = vision["spatial_merge_size"], vision.get("tokens_per_second")
    videos = found["video_grid_thw"].tolist()
    paces = (
        [speed * s for s in found["second_per_grid_ts"].tolist()] if speed else [1.0] * len(videos)
    )
    images = found["image_grid_thw"].tolist() if "image_grid_thw" in found else []
    items = {1: zip(images, [1.0] * len(images), strict=True), 2: zip(videos, paces, strict=True)}
    parts: list[int | Grid] = []
    for kind, run in groupby(found["mm_token_type_ids"][0].tolist()):
        if kind == 0:
            parts.append(len(list(run)))
            continue
        (steps, rows, columns), pace = next(items[kind])
        parts.append(Grid(steps, rows // merge, columns // merge, pace))
    return torch.tensor(published_positions(parts)).T[:, None]


def _expanded(text: str, marker: str, grids: torch.Tensor, merge: int) -> str:
    for grid in grids.tolist():
        text = text.replace(marker, "<placeholder>" * (math.prod(grid) // merge**2), 1)
    return text.replace("<placeholder>", marker)


def _video(
    processor: Qwen2VLImageProcessorPil, frames: Sequence[Image]
) -> tuple[torch.Tensor, list[int]]:
    """Each frame as the image processor makes it, which shows it twice, and of that every second one."""
    time = processor.temporal_patch_size
    frames = [*frames, *[frames[-1]] * (-len(frames) % time)]
    made = [processor(images=frame, return_tensors="pt") for frame in frames]
    _, rows, columns = made[0]["image_grid_thw"][0].tolist()
    apart = [m["pixel_values"].view(rows * columns, 3, time, -1) for m in made]
    steps = [
        torch.stack([a[:, :, 0] for a in apart[start : start + time]], 2).flatten(1)
        for start in range(0, len(frames), time)
    ]
    return torch.cat(steps), [len(steps), rows, columns]


def respelt(name: str, spelling: str) -> str:
    """A tensor's name as `CheckpointOptions.spelling` says; "old" is what is saved today."""
    if spelling == "old" or name.startswith("lm_head."):
        return name
    if name.startswith("visual."):
        return f"model.{name}"
    return name.replace("model.", "model.language_model.", 1)


def like_older_versions(folder: Path) -> Path:
    """Rewrites the files as the released checkpoints have them: the language part of the
    configuration on top, the numbers of pixels under names of their own."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope["rope_theta"]
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    vision = config["vision_config"]
    vision |= {"model_type": config["model_type"], "in_chans": vision.pop("in_channels")}
    path.write_text(json.dumps({**text, **config}))
    path = folder / "preprocessor_config.json"
    images = json.loads(path.read_text())
    size = images.pop("size")
    images |= {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    path.write_text(json.dumps(images))
    return folder
