"""LLaVA 1.5 with a CLIP or a SigLIP tower."""

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from PIL.Image import Image
from transformers import (
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from tests.support.checkpoints.options import (
    CHAT_TEMPLATE,
    CheckpointOptions,
    load_config,
    text_config,
    vision_sizes,
)


def build(
    chosen: CheckpointOptions, words: PreTrainedTokenizerFast
) -> tuple[LlavaForConditionalGeneration, LlavaProcessor]:
    """The model, not yet randomised, and its processor."""
    vision, class_tokens = tower(chosen)
    strategy = "default" if class_tokens else "full"
    text = text_config(chosen.language, chosen, words)
    config = LlavaConfig(
        **{
            "vision_config": vision,
            "text_config": text,
            "image_token_id": words.convert_tokens_to_ids("<image>"),
            "image_seq_length": (vision.image_size // vision.patch_size) ** 2,
            "vision_feature_select_strategy": strategy,
            "vision_feature_layer": -2 if class_tokens else -1,
            "tie_word_embeddings": text.tie_word_embeddings,
            **chosen.config,
        }
    )
    processor = LlavaProcessor(
        image_processor=_images(chosen, vision.image_size),
        tokenizer=words,
        patch_size=vision.patch_size,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        num_additional_image_tokens=class_tokens,
        chat_template=CHAT_TEMPLATE,
    )
    return LlavaForConditionalGeneration(config), processor


def inputs(folder: Path, text: str, images: Sequence[Image]) -> dict[str, torch.Tensor]:
    """What `generate` takes, from a rendered prompt."""
    kind = getattr(
        transformers,
        load_config(folder)["architectures"][0].replace("ForConditionalGeneration", "Processor"),
    )
    found = kind.from_pretrained(folder)(
        images=list(images) or None, text=text, return_tensors="pt"
    )
    return {k: v for k, v in found.items() if k != "attention_mask"}


def respelt(name: str, spelling: str) -> str:
    """A tensor's name as `CheckpointOptions.spelling` says."""
    if spelling == "old":
        return name.replace("vision_tower.", "vision_tower.vision_model.", 1)
    if name == "language_model.lm_head.weight":
        return "lm_head.weight"
    if name.startswith("language_model.model."):
        return "model.language_model." + name.removeprefix("language_model.model.")
    return name if name == "lm_head.weight" else f"model.{name}"


def tower(chosen: CheckpointOptions) -> tuple[CLIPVisionConfig | SiglipVisionConfig, int]:
    """CLIP with 4x4 patches and a class token, SigLIP with 3x3 patches and none; and how many."""
    if chosen.tower == "clip":
        sizes = vision_sizes(image_size=56, patch_size=14, projection_dim=32)
        return CLIPVisionConfig(**{**sizes, **chosen.vision}), 1
    sizes = vision_sizes(image_size=48, patch_size=16, vision_use_head=False)
    return SiglipVisionConfig(**{**sizes, **chosen.vision}), 0


def _images(
    chosen: CheckpointOptions, side: int
) -> CLIPImageProcessorPil | SiglipImageProcessorPil:
    square = {"height": side, "width": side}
    if chosen.tower == "clip":
        return CLIPImageProcessorPil(
            size={"shortest_edge": side}, crop_size=square, **chosen.images
        )
    return SiglipImageProcessorPil(size=square, **chosen.images)
