"""Llama's decoder as config.json describes it."""

from shared.checkpoint.folder import Checkpoint
from shared.model_config.decoder import DecoderConfig, read_config

_DEFAULTS = {
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
}


def read(checkpoint: Checkpoint) -> DecoderConfig:
    """One flag tells of biases of all four layers of the attention. Raises InvalidRequest as `read_config` does."""
    bias = checkpoint.text_config.get("attention_bias") or False
    return read_config(checkpoint, _DEFAULTS, {"attention_output_bias": bias})
