"""InternLM2's decoder as config.json describes it."""

from collections.abc import Mapping
from typing import Any

from shared.checkpoint.folder import Checkpoint
from shared.model_config.decoder import DecoderConfig, read_config

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 103_168,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "mlp_bias": False,
    "qkv_by_head": True,
}


def read(checkpoint: Checkpoint) -> DecoderConfig:
    """`bias` tells of biases of the attention. Raises InvalidRequest as `read_config` does."""
    bias = checkpoint.text_config.get("bias")
    biases = {"attention_bias": True if bias is None else bias}
    return read_config(
        checkpoint, {**DEFAULTS, **biases, "attention_output_bias": biases["attention_bias"]}
    )
