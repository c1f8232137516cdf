"""ChatGLM2's decoder as config.json describes it, under keys of its own."""

from collections.abc import Mapping
from typing import Any

from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.refusal import bad_option
from shared.model_config.decoder import DecoderConfig, read_config

_DEFAULTS: Mapping[str, Any] = {
    "num_layers": 28,
    "padded_vocab_size": 65_024,
    "hidden_size": 4096,
    "ffn_hidden_size": 13_696,
    "kv_channels": 128,
    "num_attention_heads": 32,
    "seq_length": 2048,
    "layernorm_epsilon": 1e-5,
    "multi_query_attention": False,
    "multi_query_group_num": 1,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "rope_ratio": 1,
}
# The only values that are served. The first key is that of ChatGLM-6B, another model under the same name.
_ONLY: Mapping[str, Any] = {
    "position_encoding_2d": False,
    "vision_config": None,
    "original_rope": True,
    "rmsnorm": True,
    "post_layer_norm": True,
    "apply_residual_connection_post_layernorm": False,
    "pre_seq_len": None,
    "prefix_projection": False,
    "quantization_bit": 0,
}
_BASE = 10_000.0


def read(checkpoint: Checkpoint) -> DecoderConfig:
    """Raises InvalidRequest as `read_config` does, and for each key that asks for another block."""
    config = checkpoint.text_config
    for key, served in _ONLY.items():
        if (found := config.get(key)) is not None and found != served:
            raise bad_option(
                checkpoint, f"{key} {found!r}; ChatGLM2 and its successors have {served!r}"
            )
    values = {**_DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
    ratio = float(values["rope_ratio"])
    if ratio != 1 and "chatglm2" in str(config.get("_name_or_path")).lower():
        raise bad_option(
            checkpoint, f"rope_ratio {ratio:g}, which ChatGLM2 takes as a scale of positions"
        )
    shared = bool(values["multi_query_attention"])
    bias = values["add_bias_linear"]
    return read_config(
        checkpoint,
        {
            "vocab_size": values["padded_vocab_size"],
            "intermediate_size": values["ffn_hidden_size"],
            "hidden_size": values["hidden_size"],
            "num_hidden_layers": values["num_layers"],
            "num_attention_heads": values["num_attention_heads"],
            "num_key_value_heads": values[
                "multi_query_group_num" if shared else "num_attention_heads"
            ],
            "qkv_by_head": not shared,
            "head_dim": values["kv_channels"],
            "hidden_act": "silu",
            "max_position_embeddings": values["seq_length"],
            "rms_norm_eps": values["layernorm_epsilon"],
            "attention_bias": values["add_qkv_bias"] or bias,
            "attention_output_bias": bias,
            "mlp_bias": bias,
            "partial_rotary_factor": 0.5,
            "rope_interleaved": True,
            "rope_theta": _BASE * ratio,
        },
    )
