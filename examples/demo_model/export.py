"""Writes a checkpoint folder that `transformers` loads unchanged.

`python -m examples.demo_model.export RUN` writes the shipped folder from a run's saved state.
"""

from __future__ import annotations

import argparse
import copy
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from examples.demo_model.model import (
    ASSISTANT,
    BOS,
    END,
    IMAGE_SIZE,
    PAD,
    PATCH,
    SYSTEM,
    USER,
    build_model,
)
from examples.demo_model.tokenizer import CHAT_TEMPLATE, load_tokenizer

CHECKPOINT = Path(__file__).parents[2] / "shared" / "demo_model" / "checkpoint"


def build_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    """Resizes to the square without cropping: nothing at the margins is lost."""
    side = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    images = CLIPImageProcessorPil(
        do_resize=True,
        size=side,
        resample=3,
        do_center_crop=False,
        crop_size=side,
        do_rescale=True,
        do_normalize=True,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        do_convert_rgb=True,
    )
    make: Any = LlavaProcessor  # untyped there
    processor: LlavaProcessor = make(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="full",
        chat_template=CHAT_TEMPLATE,
        image_token="<image>",
        num_additional_image_tokens=0,
    )
    return processor


def export(
    model: LlavaForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path = CHECKPOINT,
) -> int:
    """Replaces the folder's files one by one, each at once; returns their total size in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    shipped: Any = copy.deepcopy(model)
    shipped.to(torch.bfloat16)
    for part in (shipped.config.text_config, shipped.config.vision_config):
        part.dtype = torch.bfloat16  # else that of a folder which the run began with
    defaults: Any = GenerationConfig
    shipped.generation_config = defaults(
        do_sample=False,
        max_new_tokens=256,
        bos_token_id=BOS,
        pad_token_id=PAD,
        # A role token ends a turn too: whoever speaks next, it is not this answer.
        eos_token_id=[END, SYSTEM, USER, ASSISTANT],
    )
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".export-") as name:
        fresh = Path(name)
        shipped.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        # After the tokenizer's files: the folder that it comes from may have an older template.
        build_processor(tokenizer).save_pretrained(fresh)
        written = sorted(fresh.iterdir(), key=lambda p: p.suffix != ".safetensors")
        for path in written:
            if path.is_file():
                path.chmod(0o644)
                os.replace(path, folder / path.name)
            else:
                shutil.rmtree(path)
    return sum(path.stat().st_size for path in folder.iterdir())


def export_run(run: Path, folder: Path = CHECKPOINT) -> int:
    """Writes the folder from a run's `state.pt`, also while the run goes on."""
    tokenizer = load_tokenizer(run)
    model = build_model(len(tokenizer))
    state = torch.load(run / "state.pt", map_location="cpu", weights_only=True)
    weights = state["optimiser"]["weights"]
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[f"model.{name}"])
    return export(model, tokenizer, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--to", type=Path, default=CHECKPOINT)
    args = parser.parse_args()
    print(f"{export_run(args.run, args.to) / 1e6:.1f} MB")
