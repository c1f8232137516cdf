"""Qwen3's decoder as config.json describes it."""

from services.families.qwen2.config import DEFAULTS
from shared.checkpoint.folder import Checkpoint
from shared.model_config.decoder import DecoderConfig, read_config


def read(checkpoint: Checkpoint) -> DecoderConfig:
    """One flag tells of biases of all four layers of the attention. Raises InvalidRequest as `read_config` does."""
    bias = checkpoint.text_config.get("attention_bias") or False
    own = {"head_dim": 128, "head_norms": True, "attention_bias": False}
    fixed = {"attention_output_bias": bias, "mlp_bias": False}
    return read_config(checkpoint, {**DEFAULTS, **own}, fixed)
