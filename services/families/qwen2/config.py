"""Qwen2's decoder as config.json describes it."""

from collections.abc import Mapping
from typing import Any

from shared.checkpoint.folder import Checkpoint
from shared.model_config.decoder import DecoderConfig, read_config

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
# The class has no keys for these.
BIASES = {"attention_bias": True, "attention_output_bias": False, "mlp_bias": False}


def read(checkpoint: Checkpoint) -> DecoderConfig:
    """Raises InvalidRequest as `read_config` does."""
    return read_config(checkpoint, DEFAULTS, BIASES)
