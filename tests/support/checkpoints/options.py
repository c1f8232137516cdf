"""What can be chosen of a random checkpoint, and what every family of them has."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.support.tokenizers import byte_level_tokenizer

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}<image>\n{% elif content['type'] == 'text' %}"
    "{{ content['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT_MODELS: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),  # which the code of transformers runs
    "glm": (GlmConfig, GlmForCausalLM),
    "glm4": (Glm4Config, Glm4ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


@dataclass(frozen=True)
class CheckpointOptions:
    """What can be chosen. `text` overrides keys of the text config, `vision` of the vision one,
    `config` of the whole and `images` of the image processor.

    language: a text family, for LLaVA and its successors; tower: "clip" or "siglip".
    spelling: tensor names as transformers saves them, as early versions did ("old"), or as the
    module tree has them ("new": below `model.`).
    old_rope: `rope_theta` and `rope_scaling` instead of `rope_parameters`.
    shard_bytes: largest size of a file; None is one file. template: the chat template, None the
    family's.
    """

    language: str = "llama"
    tower: str = "clip"
    dtype: torch.dtype = torch.float32
    spelling: str = "saved"
    old_rope: bool = False
    shard_bytes: int | None = None
    seed: int = 0
    template: str | None = None
    eos_token_ids: tuple[int, ...] | None = None
    text: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    images: dict[str, Any] = field(default_factory=dict)


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
            elif parameter.numel() == 1:  # a gate, which is closed at first
                parameter.copy_(noise)
            else:
                parameter.add_(noise * 0.02)


def text_sizes(chosen: CheckpointOptions, words: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Keys that every text configuration has."""
    return {
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


def text_config(
    family: str, chosen: CheckpointOptions, words: PreTrainedTokenizerFast
) -> PreTrainedConfig:
    """The configuration of a text family."""
    sizes = text_sizes(chosen, words)
    if family == "qwen3":
        sizes.setdefault("head_dim", 24)
    if family in ("glm", "glm4"):
        sizes.setdefault("head_dim", 16)
    if family == "gemma2":
        sizes = {"head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 20, **sizes}
    if family == "mistral":
        sizes.setdefault("sliding_window", 20)
    return TEXT_MODELS[family][0](**sizes)


def load_config(folder: Path) -> dict[str, Any]:
    """config.json."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def vision_sizes(**more: Any) -> dict[str, Any]:
    """Keys that CLIP's and SigLIP's configurations have."""
    return {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        **more,
    }
