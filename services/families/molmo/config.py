"""Molmo's decoder as config.json describes it, under keys of its own."""

from collections.abc import Mapping
from typing import Any

from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.refusal import bad_option
from shared.model_config.decoder import DecoderConfig, read_config

_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 50_304,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "additional_vocab_size": 128,
    "qkv_bias": False,
    "attention_layer_norm": False,
    "norm_after": False,
}
# The only values that are served, of keys that a file may leave out.
_ONLY: Mapping[str, Any] = {
    "layer_norm_type": "rms",
    "weight_tying": False,
    "use_position_ids": True,
    "clip_qkv": None,
    "rope_scaling": None,
    "moe_num_experts": None,
    "num_experts": None,
    "block_type": "sequential",
    "activation_type": "swiglu",
    "include_bias": False,
    "vit_layers": [-2, -9],
    "image_pooling_2d": "attention-meanq",
    "image_projector": "mlp",
    "image_padding_embed": "pad_and_partial_pad",
}


def read(checkpoint: Checkpoint) -> DecoderConfig:
    """Raises InvalidRequest as `read_config` does, and for each key that asks for another model.

    `vocab_size` counts the tokens of pictures, which have an embedding and no output.
    """
    config = checkpoint.text_config
    for key, served in _ONLY.items():
        if (found := config.get(key)) is not None and found != served:
            raise bad_option(
                checkpoint,
                f"{key} {found!r}; Molmo is served with {served!r}",
            )
    values = {**_DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
    known = values.get("embedding_size") or values["vocab_size"]
    after = bool(values["norm_after"])
    return read_config(
        checkpoint,
        values,
        {
            "vocab_size": known + values["additional_vocab_size"],
            "intermediate_size": values["intermediate_size"] // 2,
            "hidden_act": "silu",
            "rms_norm_eps": values["layer_norm_eps"],
            "attention_bias": values["qkv_bias"],
            "attention_output_bias": False,
            "mlp_bias": False,
            "row_norms": values["attention_layer_norm"],
            "pre_norms": not after,
            "post_norms": after,
            "up_first": True,
        },
    )
