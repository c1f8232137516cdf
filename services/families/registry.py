"""Which architectures can be served, and what each takes for keys that its config.json leaves out.

The one list of them: services load what stands here, and refuse everything else with the same words.
"""

from collections.abc import Mapping
from typing import Any

from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from shared.model_config.decoder import DecoderConfig, read_config

# Architecture -> decoder family.
TEXT = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_WITH_OWN_DECODER = {
    "Qwen2VLForConditionalGeneration": "qwen2_vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
}
# The language part of these is a model of its own, named by text_config's model_type.
LLAVA = ("LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration")
VISION = (*LLAVA, *_WITH_OWN_DECODER)
ARCHITECTURES = (*TEXT, *VISION)

_QWEN: Mapping[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "mlp_bias": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_QWEN2_VL: Mapping[str, Any] = {
    **_QWEN,
    "vocab_size": 152_064,
    "hidden_size": 8192,
    "intermediate_size": 29_568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "attention_bias": True,
    "attention_output_bias": False,
    "max_window_layers": 80,
}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "mistral": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_output_bias": False,
        "mlp_bias": False,
        "max_window_layers": 0,
    },
    "qwen2": {**_QWEN, "attention_bias": True, "attention_output_bias": False},
    "qwen2_vl": _QWEN2_VL,
    "qwen2_5_vl": _QWEN2_VL,
    "qwen3": {**_QWEN, "head_dim": 128, "attention_bias": False, "head_norms": True},
}


def has_vision(checkpoint: Checkpoint) -> bool:
    """Whether it takes pictures. Raises InvalidRequest for an unknown architecture."""
    decoder_family(checkpoint)
    return checkpoint.architecture in VISION


def decoder_family(checkpoint: Checkpoint) -> str:
    """The family of a checkpoint's language part. Raises InvalidRequest for an unknown architecture."""
    architecture = checkpoint.architecture
    if architecture in _WITH_OWN_DECODER:
        return _WITH_OWN_DECODER[architecture]
    if architecture in LLAVA:
        kind = str(checkpoint.text_config.get("model_type", "llama"))
        if kind in TEXT.values():
            return kind
        raise _unknown(checkpoint, f"{architecture} with text model {kind!r}")
    if architecture not in TEXT:
        raise _unknown(checkpoint, architecture)
    return TEXT[architecture]


def read_decoder_config(checkpoint: Checkpoint) -> DecoderConfig:
    """The shape of the language part. Raises InvalidRequest for what its family does not have."""
    family = decoder_family(checkpoint)
    given = checkpoint.text_config
    defaults = dict(_DEFAULTS[family])
    if family in ("llama", "qwen3"):  # one flag for all four attention layers
        defaults["attention_output_bias"] = given.get("attention_bias") or False
    if family == "mistral":  # left out it is version 0.1's; null is none
        window = given.get("sliding_window", 4096)
        defaults |= {"sliding_window": window, "use_sliding_window": bool(window)}
    config = read_config(checkpoint, defaults)
    if family in _WITH_OWN_DECODER.values():
        config.rope.sections()
    return config


def _unknown(checkpoint: Checkpoint, what: str) -> InvalidRequest:
    return InvalidRequest(
        "UNKNOWN_ARCHITECTURE",
        f"{checkpoint.folder}: {what} cannot be served; these can: {', '.join(ARCHITECTURES)}"
        f" (the LLaVA ones with a text model of {', '.join(TEXT.values())})",
        field="model",
    )
