"""A decoder's shape, read from `config.json` with the defaults of its family."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.refusal import bad_option
from shared.model_backends import ModelBackend
from shared.model_config.quantization import (
    key_of_encoder,
    read_encoder_codes,
    read_stored_codes,
)
from shared.model_config.rope import RopeConfig
from shared.text.cutting import cut

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_NONE = ("num_key_value_heads", "sliding_window")  # as many as queries; all tokens


@dataclass(frozen=True)
class TextSizes:
    """What every decoder has, in elements and tokens. `max_position_embeddings` is 0 where nothing says it."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position_embeddings: int


@dataclass(frozen=True)
class DecoderConfig(TextSizes):
    """Of a block like Llama's. `tied`: the output layer is the embedding unless another is stored.

    windows: for each layer how many tokens a query sees, itself included; None is all. What has
    left a window stays in the cache: blocks are shared between sequences and freed as a whole.
    """

    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    tied: bool
    qkv_bias: bool
    output_bias: bool  # of the attention's output layer
    mlp_bias: bool
    head_norms: bool  # RMS norms of each head's queries and keys before rotation
    row_norms: bool  # the same of all queries of a token together, and of all its keys
    pre_norms: bool  # RMS norms of what attention and MLP are given
    post_norms: bool  # RMS norms of what attention and MLP give, before it is added
    qkv_by_head: bool  # of one stored matrix: each key head's queries, its key, its value; else all queries first
    up_first: bool  # of one stored matrix: what is gated above the gates; else the gates first
    windows: tuple[int | None, ...]
    rope: RopeConfig

    attends_to_media: ClassVar[bool] = False  # some layers, instead of the text


def read_config(
    checkpoint: Checkpoint, defaults: Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> DecoderConfig:
    """The shape, with what `defaults` say where the checkpoint is silent and `overrides` where it means another thing.

    Beside the keys of configuration classes, `defaults` may have `head_norms`, `row_norms`, `pre_norms` (true where
    it is not there), `post_norms`, `qkv_by_head`, `up_first` and `rope_interleaved`; only families whose defaults name
    `partial_rotary_factor` have one, and only those whose defaults name `sliding_window` have windows: their classes
    know the keys, others ignore them. Raises InvalidRequest for an option that the model code does not have.
    """
    text = checkpoint.text_config
    # `None` stands for "not given" in these files, but for what is none itself.
    none = {key: None for key in _NONE if key in text}
    values = {**defaults, **none, **{k: value for k, value in text.items() if value is not None}}
    values |= overrides or {}
    if values["hidden_act"] not in ("silu", "swish"):
        raise bad_option(checkpoint, f"hidden_act {values['hidden_act']!r}; this model has silu")
    refuse_quantization(checkpoint, ModelBackend.NATIVE)

    def whole(key: str) -> int:
        return read_whole(checkpoint, key, values[key])

    heads = whole("num_attention_heads")
    if heads < 1:
        raise bad_option(checkpoint, f"{heads} attention heads")
    hidden_size = whole("hidden_size")
    head_size = whole("head_dim") if values.get("head_dim") else hidden_size // heads
    kv_heads = whole("num_key_value_heads") if values.get("num_key_value_heads") else heads
    if head_size < 1:
        raise bad_option(checkpoint, f"{heads} attention heads of size {head_size}")
    if heads % kv_heads:
        raise bad_option(
            checkpoint, f"{heads} attention heads do not divide into {kv_heads} groups"
        )
    layers = whole("num_hidden_layers")
    return DecoderConfig(
        vocab_size=whole("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=whole("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        max_position_embeddings=whole("max_position_embeddings"),
        rms_norm_eps=float(values["rms_norm_eps"]),
        tied=bool(checkpoint.config.get("tie_word_embeddings") or text.get("tie_word_embeddings")),
        qkv_bias=bool(values["attention_bias"]),
        output_bias=bool(values["attention_output_bias"]),
        mlp_bias=bool(values["mlp_bias"]),
        head_norms=bool(values.get("head_norms")),
        row_norms=bool(values.get("row_norms")),
        pre_norms=bool(values.get("pre_norms", True)),
        post_norms=bool(values.get("post_norms")),
        qkv_by_head=bool(values.get("qkv_by_head")),
        up_first=bool(values.get("up_first")),
        windows=_windows(checkpoint, values, layers)
        if "sliding_window" in defaults
        else (None,) * layers,
        rope=RopeConfig.read(values, head_size, "partial_rotary_factor" in defaults),
    )


def read_whole(checkpoint: Checkpoint, key: str, value: Any) -> int:
    """A number of config.json. Raises InvalidRequest, naming the key, for another value."""
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        raise bad_option(
            checkpoint, f"{key} is {cut(repr(value), 60)}, which is no whole number"
        ) from None


def refuse_quantization(checkpoint: Checkpoint, by: ModelBackend) -> None:
    """Raises InvalidRequest for a checkpoint whose weights are quantized in a way that is not read where the code of
    `by`, a decoder of ours or transformers, runs the layers."""
    own = key_of_encoder(checkpoint)
    if by is ModelBackend.TRANSFORMERS and own is not None:
        raise bad_option(
            checkpoint,
            f"{own} says that the encoder is quantized by itself, which is not read where the code of transformers"
            " runs it; serve the model in float32, float16 or bfloat16",
        )
    read_stored_codes(checkpoint)
    read_encoder_codes(checkpoint)


def _windows(
    checkpoint: Checkpoint, values: Mapping[str, Any], layers: int
) -> tuple[int | None, ...]:
    """By `use_sliding_window`, `sliding_window` and `layer_types` or `max_window_layers`."""
    if not values.get("use_sliding_window") or values.get("sliding_window") is None:
        return (None,) * layers
    window = int(values["sliding_window"])
    if window < 1:
        raise bad_option(checkpoint, f"sliding_window {window} is not a number of tokens")
    kinds = values.get("layer_types")
    if kinds is None:
        first = int(values.get("max_window_layers", 0))
        return tuple(window if i >= first else None for i in range(layers))
    unknown = sorted(set(kinds) - _LAYER_TYPES)
    if unknown or len(kinds) != layers:
        raise bad_option(
            checkpoint,
            f"layer_types has {len(kinds)} entries for {layers} layers, of which unknown are"
            f" {', '.join(unknown) or 'none'}; there are {', '.join(sorted(_LAYER_TYPES))}",
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
