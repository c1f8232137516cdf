"""ChatGLM-6B's decoder as config.json describes it, under keys of its own."""

from collections.abc import Mapping
from typing import Any

from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.refusal import bad_option
from shared.model_config.decoder import DecoderConfig, read_config

_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 130_528,
    "hidden_size": 4096,
    "num_layers": 28,
    "num_attention_heads": 32,
    "inner_hidden_size": 16_384,
    "layernorm_epsilon": 1e-5,
    "max_sequence_length": 2048,
}
# The only values that are served.
_ONLY: Mapping[str, Any] = {
    "position_encoding_2d": True,
    "pre_seq_len": None,
    "prefix_projection": False,
    "quantization_bit": 0,
}


def read(checkpoint: Checkpoint) -> DecoderConfig:
    """Each half of a head is rotated by itself. Raises InvalidRequest as `read_config` does, and for each key that asks
    for another block."""
    config = checkpoint.text_config
    for key, served in _ONLY.items():
        if (found := config.get(key)) is not None and found != served:
            raise bad_option(checkpoint, f"{key} {found!r}; ChatGLM-6B is served with {served!r}")
    values = {**_DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
    size = int(values["hidden_size"]) // int(values["num_attention_heads"])
    if size % 4:
        raise bad_option(checkpoint, f"heads of {size} elements, whose halves are not pairs")
    return read_config(
        checkpoint,
        {
            "num_hidden_layers": values["num_layers"],
            "vocab_size": values["vocab_size"],
            "hidden_size": values["hidden_size"],
            "num_attention_heads": values["num_attention_heads"],
            "intermediate_size": values["inner_hidden_size"],
            "rms_norm_eps": values["layernorm_epsilon"],
            "max_position_embeddings": values["max_sequence_length"],
            "hidden_act": "silu",  # of no effect: the block has one activation
            "attention_bias": True,
            "attention_output_bias": True,
            "mlp_bias": True,
            "qkv_by_head": True,
            "partial_rotary_factor": 0.5,
        },
    )
