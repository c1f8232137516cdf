"""Qwen's decoder as config.json describes it, under keys of its own."""

from collections.abc import Mapping
from typing import Any

from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.refusal import bad_option
from shared.model_config.decoder import DecoderConfig, read_config

_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 22_016,
    "kv_channels": 128,
    "layer_norm_epsilon": 1e-6,
    "rotary_emb_base": 10_000,
    "seq_length": 8192,
    "no_bias": True,
    "hidden_act": "silu",
}
# Names that keys had in the first release.
_FIRST_KEYS: Mapping[str, str] = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "ffn_hidden_size": "intermediate_size",
    "padded_vocab_size": "vocab_size",
}
# The only values that are served.
_ONLY: Mapping[str, Any] = {
    "rotary_pct": 1.0,
    "scale_attn_weights": True,
    "use_cache_quantization": False,
}


def read(checkpoint: Checkpoint) -> DecoderConfig:
    """`intermediate_size` counts gate and up together. Raises InvalidRequest as `read_config` does."""
    config = checkpoint.text_config
    for key, served in _ONLY.items():
        if (found := config.get(key)) is not None and found != served:
            raise bad_option(
                checkpoint,
                f"{key} {found!r}; Qwen is served with {served!r}",
            )
    given = {key: value for key, value in config.items() if value is not None}
    first = {key: given[older] for older, key in _FIRST_KEYS.items() if older in given}
    values = {**_DEFAULTS, **first, **given}
    return read_config(
        checkpoint,
        {**_DEFAULTS, **first},
        {
            "intermediate_size": int(values["intermediate_size"]) // 2,
            "head_dim": values["kv_channels"],
            "rms_norm_eps": values["layer_norm_epsilon"],
            "rope_theta": values["rotary_emb_base"],
            # Beyond it frequencies and scores depend on the running text's length.
            "max_position_embeddings": values["seq_length"],
            "attention_bias": True,
            "attention_output_bias": not values["no_bias"],
            "mlp_bias": not values["no_bias"],
        },
    )
