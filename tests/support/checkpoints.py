"""Small random checkpoints made with transformers: whole folders, for every room and end to end.

`make_checkpoint(folder, family, ...)` writes weights, config, generation config, a real byte-level
BPE tokenizer, a chat template and, for LLaVA, a processor.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.tokenizers import byte_level_tokenizer
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    SiglipVisionConfig,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}<image>\n{% elif content['type'] == 'text' %}"
    "{{ content['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FAMILIES = ("llama", "qwen2", "llava")
SPELLINGS = ("saved", "old", "new")


@dataclass(frozen=True)
class CheckpointOptions:
    """What can be chosen. `text` overrides keys of the text config, `vision` of the vision one.

    language: "llama" or "qwen2" (for LLaVA); tower: "clip" or "siglip".
    spelling: tensor names as transformers saves them, as version 4.36 did ("old": the tower below
    `vision_tower.vision_model`), or as the module tree has them ("new": below `model.`).
    old_rope: `rope_theta` and `rope_scaling` instead of `rope_parameters`.
    shard_bytes: largest size of a file; None is one file.
    """

    language: str = "llama"
    tower: str = "clip"
    dtype: torch.dtype = torch.float32
    spelling: str = "saved"
    old_rope: bool = False
    shard_bytes: int | None = None
    seed: int = 0
    eos_token_ids: tuple[int, ...] | None = None
    text: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=dict)


def make_checkpoint(folder: Path, family: str = "llava", **options: Any) -> Path:
    """Writes a checkpoint of a family (FAMILIES) with CheckpointOptions; returns the folder.

    Every parameter of two or more dimensions is drawn from N(0, 0.2), so that greedy choices are
    not degenerate; the others are jittered.
    """
    chosen = CheckpointOptions(**options)
    words = tokenizer()
    if family == "llava":
        model, processor = _llava(chosen, words)
        processor.save_pretrained(folder)
    else:
        kind = {"llama": LlamaForCausalLM, "qwen2": Qwen2ForCausalLM}[family]
        model = kind(_text_config(family, chosen, words))
        words.save_pretrained(folder)
    randomise(model, chosen.seed)
    model = model.to(chosen.dtype)
    ids = chosen.eos_token_ids
    model.generation_config.eos_token_id = words.eos_token_id if ids is None else list(ids) or None
    model.generation_config.pad_token_id = words.pad_token_id
    size = "10GB" if chosen.shard_bytes is None else chosen.shard_bytes
    model.save_pretrained(folder, max_shard_size=size)
    _respell_names(folder, chosen.spelling)
    if chosen.old_rope:
        _respell_rope(folder)
    return folder


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with ChatML tokens, `<image>` and a chat template."""
    words = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_tokenizer(),
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    words.chat_template = CHAT_TEMPLATE
    return words


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Draws every parameter anew, the same for equal seeds."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                parameter.copy_(noise * 0.2)
            else:
                parameter.add_(noise * 0.02)


def load_reference(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The checkpoint as transformers loads it, ready to be asked."""
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    kinds = (LlamaForCausalLM, Qwen2ForCausalLM, LlavaForConditionalGeneration)
    kind = next(k for k in kinds if k.__name__ == architecture)
    model: PreTrainedModel = kind.from_pretrained(folder, dtype=dtype)
    return model.eval()


def _text_config(
    family: str, chosen: CheckpointOptions, words: PreTrainedTokenizerFast
) -> LlamaConfig | Qwen2Config:
    values = {
        "vocab_size": len(words),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": words.bos_token_id,
        "eos_token_id": words.eos_token_id,
        "pad_token_id": words.pad_token_id,
        **chosen.text,
    }
    return {"llama": LlamaConfig, "qwen2": Qwen2Config}[family](**values)


def _llava(
    chosen: CheckpointOptions, words: PreTrainedTokenizerFast
) -> tuple[LlavaForConditionalGeneration, LlavaProcessor]:
    vision, images, class_tokens = _clip(chosen) if chosen.tower == "clip" else _siglip(chosen)
    strategy = "default" if chosen.tower == "clip" else "full"
    text = _text_config(chosen.language, chosen, words)
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=words.convert_tokens_to_ids("<image>"),
        image_seq_length=(vision.image_size // vision.patch_size) ** 2,
        vision_feature_select_strategy=strategy,
        vision_feature_layer=-2 if chosen.tower == "clip" else -1,
        tie_word_embeddings=text.tie_word_embeddings,
    )
    processor = LlavaProcessor(
        image_processor=images,
        tokenizer=words,
        patch_size=vision.patch_size,
        vision_feature_select_strategy=strategy,
        num_additional_image_tokens=class_tokens,
        chat_template=CHAT_TEMPLATE,
    )
    return LlavaForConditionalGeneration(config), processor


def _clip(chosen: CheckpointOptions) -> tuple[CLIPVisionConfig, CLIPImageProcessorPil, int]:
    """4x4 patches and a class token."""
    sizes = _vision_sizes(image_size=56, patch_size=14, projection_dim=32)
    vision = CLIPVisionConfig(**{**sizes, **chosen.vision})
    size = vision.image_size
    images = CLIPImageProcessorPil(
        size={"shortest_edge": size}, crop_size={"height": size, "width": size}
    )
    return vision, images, 1


def _siglip(chosen: CheckpointOptions) -> tuple[SiglipVisionConfig, SiglipImageProcessorPil, int]:
    """3x3 patches, no class token."""
    sizes = _vision_sizes(image_size=48, patch_size=16, vision_use_head=False)
    vision = SiglipVisionConfig(**{**sizes, **chosen.vision})
    images = SiglipImageProcessorPil(size={"height": vision.image_size, "width": vision.image_size})
    return vision, images, 0


def _vision_sizes(**more: Any) -> dict[str, Any]:
    return {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        **more,
    }


def _respell_names(folder: Path, spelling: str) -> None:
    if spelling == "saved":
        return
    for file in sorted(folder.glob("*.safetensors")):
        tensors = {_respelt(name, spelling): value for name, value in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
        content["weight_map"] = {
            _respelt(name, spelling): file for name, file in content["weight_map"].items()
        }
        index.write_text(json.dumps(content))


def _respelt(name: str, spelling: str) -> str:
    if spelling == "old":
        return name.replace("vision_tower.", "vision_tower.vision_model.", 1)
    if name == "language_model.lm_head.weight":
        return "lm_head.weight"
    if name.startswith("language_model.model."):
        return "model.language_model." + name.removeprefix("language_model.model.")
    return name if name == "lm_head.weight" else f"model.{name}"


def _respell_rope(folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    text = config.get("text_config", config)
    parameters = text.pop("rope_parameters")
    text["rope_theta"] = parameters.pop("rope_theta")
    if parameters.get("rope_type", "default") != "default":
        text["rope_scaling"] = parameters
    path.write_text(json.dumps(config))
