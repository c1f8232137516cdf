"""InternVL in its own layout: other names, its own configuration, an image processor's file that knows of no tiles."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from safetensors.torch import load_file, save_file
from transformers import (
    InternVLConfig,
    InternVLForConditionalGeneration,
    PreTrainedTokenizerFast,
)
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from tests.support.checkpoints import internlm2
from tests.support.checkpoints.options import (
    CHAT_TEMPLATE,
    CheckpointOptions,
    load_config,
    text_config,
    vision_sizes,
)

START, ROW, END = "<img>", "<IMG_CONTEXT>", "</img>"
SIDE, PATCH = 56, 14
BASE = "internvl_chat"
TEXT: dict[str, Any] = {}
_TILES = {"min_dynamic_patch": 1, "max_dynamic_patch": 6}
_MEAN, _STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
_NAMES = {
    "vision_tower.embeddings.cls_token": "vision_model.embeddings.class_embedding",
    "vision_tower.embeddings.position_embeddings": "vision_model.embeddings.position_embedding",
    "vision_tower.embeddings.patch_embeddings.projection": "vision_model.embeddings.patch_embedding",
    "vision_tower.encoder.layer.": "vision_model.encoder.layers.",
    "attention.projection_layer": "attn.proj",
    "attention.q_norm": "attn.q_norm",
    "attention.k_norm": "attn.k_norm",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "lambda_": "ls",
    "multi_modal_projector.layer_norm": "mlp1.0",
    "multi_modal_projector.linear_1": "mlp1.1",
    "multi_modal_projector.linear_2": "mlp1.3",
}


def build(
    chosen: CheckpointOptions, words: PreTrainedTokenizerFast
) -> tuple[InternVLForConditionalGeneration, PreTrainedTokenizerFast]:
    """The model, not yet randomised, and its tokenizer; language: "internlm2" is a Llama in InternLM2's layout."""
    words.add_special_tokens({"extra_special_tokens": [START, ROW, END]})
    words.chat_template = CHAT_TEMPLATE.replace("<image>", START)
    language = "llama" if chosen.language == "internlm2" else chosen.language
    text = text_config(language, chosen, words)
    vision = vision_sizes(image_size=[SIDE, SIDE], patch_size=[PATCH, PATCH], attention_bias=True)
    config = InternVLConfig(
        **{
            "vision_config": {**vision, **chosen.vision},
            "text_config": text,
            "image_token_id": words.convert_tokens_to_ids(ROW),
            "image_seq_length": (SIDE // PATCH // 2) ** 2,
            "vision_feature_layer": -1,
            "tie_word_embeddings": text.tie_word_embeddings,
            **chosen.config,
        }
    )
    return InternVLForConditionalGeneration(config), words


def rewrite(saved: Path, folder: Path, chosen: CheckpointOptions) -> None:
    """Writes configuration and tensors of an InternVL that transformers saved in its own layout."""
    known = json.loads((saved / "config.json").read_text())
    text, vision = known["text_config"], known["vision_config"]
    tensors = load_file(saved / "model.safetensors")
    if chosen.language == "internlm2":
        tensors = internlm2.renamed(tensors, text)
        text = internlm2.text_config(text)
    config = {
        "architectures": ["InternVLChatModel"],
        "model_type": "internvl_chat",
        "llm_config": text,
        "vision_config": {
            **{key: vision[key] for key in vision_sizes()},
            "image_size": vision["image_size"][0],
            "patch_size": vision["patch_size"][0],
            "qkv_bias": vision["attention_bias"],
            "qk_normalization": vision["use_qk_norm"],
            "norm_type": vision["norm_type"],
            "layer_norm_eps": vision["layer_norm_eps"],
        },
        "downsample_ratio": known["downsample_ratio"],
        "select_layer": known["vision_feature_layer"],
        "force_image_size": vision["image_size"][0],
        "ps_version": "v2",
        "dynamic_image_size": True,
        "use_thumbnail": True,
        "template": "that of the tokenizer's files",
        "tie_word_embeddings": known["tie_word_embeddings"],
        **_TILES,
    }
    (folder / "config.json").write_text(json.dumps(config))
    images = {"image_processor_type": "CLIPImageProcessor", "size": SIDE, "crop_size": SIDE}
    images |= {"image_mean": _MEAN, "image_std": _STD}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    save_file(_renamed(tensors), folder / "model.safetensors", {"format": "pt"})


def inputs(folder: Path, text: str, images: Sequence[Image]) -> dict[str, torch.Tensor]:
    """What `generate` takes, from a rendered prompt."""
    found: dict[str, torch.Tensor] = {}
    if images:
        made = processor(folder)(images=list(images), return_tensors="pt")
        found["pixel_values"] = made["pixel_values"]
        config = load_config(folder)
        rows = round((SIDE // PATCH * config["downsample_ratio"]) ** 2)
        for tiles in made["num_patches"].tolist():
            text = text.replace(START, f"<start>{ROW * (rows * tiles)}{END}", 1)
    words = PreTrainedTokenizerFast.from_pretrained(folder)
    text = text.replace("<start>", START)
    ids = words(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    return {"input_ids": ids, **found}


def processor(folder: Path) -> GotOcr2ImageProcessorPil:
    """That of transformers, with the folder's numbers of tiles."""
    config = load_config(folder)
    return GotOcr2ImageProcessorPil(
        size={"height": SIDE, "width": SIDE},
        crop_to_patches=config["dynamic_image_size"],
        min_patches=config["min_dynamic_patch"],
        max_patches=config["max_dynamic_patch"],
        image_mean=_MEAN,
        image_std=_STD,
    )


def _renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    written = {}
    for name, tensor in tensors.items():
        part = re.fullmatch(r"(vision_tower\.encoder\.layer\.\d+\.)attention\.q_proj(\.\w+)", name)
        if part:
            parts = [tensors[f"{part[1]}attention.{kind}_proj{part[2]}"] for kind in "qkv"]
            written[_new_name(f"{part[1]}attn.qkv{part[2]}")] = torch.cat(parts)
        elif not re.search(r"vision_tower.*attention\.[kv]_proj", name):
            written[_new_name(name)] = tensor
    return written


def _new_name(name: str) -> str:
    if name.startswith("language_model."):
        return name
    for theirs, ours in _NAMES.items():
        name = name.replace(theirs, ours)
    return name
