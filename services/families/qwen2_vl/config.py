"""Qwen2-VL's decoder as config.json describes it."""

from services.families.qwen2.config import BIASES, DEFAULTS
from shared.checkpoint.folder import Checkpoint
from shared.model_config.decoder import DecoderConfig, read_config

_OWN = {
    "vocab_size": 152_064,
    "hidden_size": 8192,
    "intermediate_size": 29_568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_window_layers": 80,
}


def read(checkpoint: Checkpoint) -> DecoderConfig:
    """Raises InvalidRequest as `read_config` does, and for sections that do not divide a head."""
    config = read_config(checkpoint, {**DEFAULTS, **_OWN}, BIASES)
    config.rope.sections()
    return config
