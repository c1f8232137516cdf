"""Small random LLaVA checkpoints with everything a real folder has: weights, tokenizer, template, processor."""

import json
from pathlib import Path
from typing import Any

import torch
from support.tokenizers import byte_level_tokenizer
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

# One loop over parts, as llava-hf writes it.
PARTS_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}<image>\n{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ content['text'] }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRING_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MAX_LEN = 256


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with ChatML tokens and `<image>`."""
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level_tokenizer(),
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
    )


def llava_checkpoint(
    folder: Path,
    tower: str = "clip",
    template: str = PARTS_TEMPLATE,
    vision_changes: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """A LLaVA folder with a "clip" (4x4 patches and a class token) or "siglip" (3x3 patches) tower."""
    torch.manual_seed(3)
    words = tokenizer()
    vision, images, extra = _clip() if tower == "clip" else _siglip()
    for name, value in (vision_changes or {}).items():
        setattr(vision, name, value)
    strategy = config.pop(
        "vision_feature_select_strategy", "default" if tower == "clip" else "full"
    )
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=vision,
            text_config=_text(len(words)),
            image_token_id=words.convert_tokens_to_ids("<image>"),
            vision_feature_select_strategy=strategy,
            **config,
        )
    )
    _randomise(model)
    model.save_pretrained(folder)
    LlavaProcessor(
        image_processor=images,
        tokenizer=words,
        patch_size=vision.patch_size,
        vision_feature_select_strategy=strategy,
        num_additional_image_tokens=extra,
        chat_template=template,
    ).save_pretrained(folder)
    return folder


def llama_checkpoint(folder: Path, template: str = STRING_TEMPLATE) -> Path:
    """A text-only folder."""
    torch.manual_seed(3)
    words = tokenizer()
    words.chat_template = template
    LlamaForCausalLM(_text(len(words))).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def like_older_versions(folder: Path) -> Path:
    """Rewrites the folder as transformers 4.36 would have: old names, old files, old spellings."""
    from safetensors.torch import load_file, save_file

    combined = json.loads((folder / "processor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(combined["image_processor"]))
    (folder / "processor_config.json").unlink()
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    tensors = load_file(folder / "model.safetensors")
    renamed = {
        name.replace("vision_tower.", "vision_tower.vision_model."): tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    return folder


def like_newer_versions(folder: Path) -> Path:
    """Rewrites the tensor names to those below one `model.`, as the module tree has them."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    save_file(
        {
            name if name == "lm_head.weight" else f"model.{name}": tensor
            for name, tensor in tensors.items()
        },
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return folder


def _text(vocab_size: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LEN,
    )


def _clip() -> tuple[CLIPVisionConfig, CLIPImageProcessorPil, int]:
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        image_size=56,
        patch_size=14,
        projection_dim=16,
    )
    images = CLIPImageProcessorPil(
        size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}
    )
    return vision, images, 1


def _siglip() -> tuple[SiglipVisionConfig, SiglipImageProcessorPil, int]:
    vision = SiglipVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=48,
        patch_size=16,
        vision_use_head=False,
    )
    images = SiglipImageProcessorPil(size={"height": 48, "width": 48})
    # LlavaProcessor reads the output's size from here where it computes without an image.
    images.crop_size = {"height": 48, "width": 48}
    return vision, images, 0


def _randomise(model: torch.nn.Module) -> None:
    """Spreads the weights, so that equal outputs mean equal computations."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2 if parameter.ndim > 1 else 0.02)
            if parameter.ndim == 1:
                parameter.add_(1.0)
