"""Mistral's decoder as config.json describes it."""

from shared.checkpoint.folder import Checkpoint
from shared.model_config.decoder import DecoderConfig, read_config

_DEFAULTS = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
}
# Its class has no keys for these: no biases, and its window is every layer's.
_FIXED = {
    "attention_bias": False,
    "attention_output_bias": False,
    "mlp_bias": False,
    "use_sliding_window": True,
    "layer_types": None,
    "max_window_layers": 0,
}


def read(checkpoint: Checkpoint) -> DecoderConfig:
    """A window that is left out is version 0.1's; null is none. Raises InvalidRequest as `read_config` does."""
    return read_config(checkpoint, _DEFAULTS, _FIXED)
