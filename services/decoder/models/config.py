"""A decoder's shape, read from `config.json` with the defaults of its family."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.decoder.models.rope import RopeConfig
from shared.checkpoint import Checkpoint
from shared.errors import InvalidRequest


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes in elements. `tied`: the output layer is the embedding."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    tied: bool
    qkv_bias: bool
    output_bias: bool  # of the attention's output layer
    mlp_bias: bool
    rope: RopeConfig


def read_config(checkpoint: Checkpoint, defaults: Mapping[str, Any]) -> DecoderConfig:
    """Raises InvalidRequest for an option that the model code does not have."""
    text = checkpoint.text_config
    # `None` stands for "not given" in these files.
    values = {**defaults, **{key: value for key, value in text.items() if value is not None}}
    if values["hidden_act"] not in ("silu", "swish"):
        raise _refuse(checkpoint, f"hidden_act {values['hidden_act']!r}; this model has silu")
    for key in ("quantization_config", "compression_config"):
        if checkpoint.config.get(key) or text.get(key):
            raise _refuse(checkpoint, f"{key}: quantized checkpoints are not supported yet")
    heads = int(values["num_attention_heads"])
    head_size = int(values.get("head_dim") or values["hidden_size"] // heads)
    kv_heads = int(values.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise _refuse(checkpoint, f"{heads} attention heads do not divide into {kv_heads} groups")
    return DecoderConfig(
        vocab_size=int(values["vocab_size"]),
        hidden_size=int(values["hidden_size"]),
        intermediate_size=int(values["intermediate_size"]),
        num_layers=int(values["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        max_position_embeddings=int(values["max_position_embeddings"]),
        rms_norm_eps=float(values["rms_norm_eps"]),
        tied=bool(checkpoint.config.get("tie_word_embeddings") or text.get("tie_word_embeddings")),
        qkv_bias=bool(values["attention_bias"]),
        output_bias=bool(values["attention_output_bias"]),
        mlp_bias=bool(values["mlp_bias"]),
        rope=RopeConfig.read(values, head_size),
    )


def _refuse(checkpoint: Checkpoint, what: str) -> InvalidRequest:
    return InvalidRequest(
        "UNSUPPORTED_CONFIG", f"{checkpoint.folder / 'config.json'}: {what}", field="model"
    )
