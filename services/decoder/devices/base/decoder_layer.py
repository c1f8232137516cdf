"""A decoder layer as the ops see it: weights and whatever else is alike in every step."""

from dataclasses import dataclass

from torch import Tensor

from services.decoder.steps.attention_meta import HeadNorms, Heads, Packed


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """RMS norm, rotary grouped-query attention, SwiGLU, as in Llama; the norm before the first
    layer is the model's own, each layer ends with the one that follows it."""

    qkv: Packed  # [(num_heads + 2 num_kv_heads) * head_size, H]
    output: Packed
    post_norm: Tensor | None  # before the MLP; None: it gets the sum so far as it is
    gate_up: Packed  # [2 * intermediate, H]
    down: Packed
    after_norm: Tensor | None  # None: the next layer gets the sum so far as it is
    heads: Heads
    norms: HeadNorms | None
    scale: float  # of attention scores
    window: int | None  # tokens that a query sees, itself included; None is all
    eps: float
    attention_norm: Tensor | None = None  # of what attention gives, before it is added
    mlp_norm: Tensor | None = None  # of what the MLP gives; either both or none
    # Of all heads together: weights [num_q * size] and [num_kv * size].
    row_norms: HeadNorms | None = None
    # See `KVSpec.kept`.
    kept: tuple[tuple[int, ...], ...] = ()
