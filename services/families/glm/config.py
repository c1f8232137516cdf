"""GLM's decoder as config.json describes it."""

from collections.abc import Mapping
from typing import Any

from shared.checkpoint.folder import Checkpoint
from shared.model_config.decoder import DecoderConfig, read_config

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 151_552,
    "hidden_size": 4096,
    "intermediate_size": 13_696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1.5625e-07,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "rope_interleaved": True,
}
# The class has no keys for these.
BIASES = {"attention_output_bias": False, "mlp_bias": False}


def read(checkpoint: Checkpoint) -> DecoderConfig:
    """Raises InvalidRequest as `read_config` does."""
    return read_config(checkpoint, DEFAULTS, BIASES)
