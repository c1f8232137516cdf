"""The weights of one decoder layer: taken from a checkpoint, fused, and packed for a device."""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from services.decoder.devices.base.decoder_layer import DecoderLayer
from services.decoder.devices.base.ops import BaseOps
from services.decoder.language_weights import LanguageWeights
from services.decoder.models.kept_keys import kept_elements
from services.decoder.models.rope import head_order
from services.decoder.steps.attention_meta import HeadNorms, Heads
from shared.model_config.decoder import DecoderConfig
from shared.weights.heads import head_places
from shared.weights.linear_weight import LinearWeight, StackedWeight


def load_layer(
    weights: LanguageWeights,
    i: int,
    after_norm: Tensor | None,
    config: DecoderConfig,
    ops: BaseOps,
) -> DecoderLayer:
    """Layer number `i`, of several ranks this one's share; after_norm: the norm behind it. Queries, keys and values may
    be stored as one matrix, and gate and up as another. Raises InvalidRequest as `LanguageWeights.take` does."""
    layer = f"layers.{i}"
    hidden, inner = config.hidden_size, config.intermediate_size
    attention = f"{layer}.self_attn"
    share = ops.share

    def norm(name: str) -> Tensor:
        return ops.vector(weights.take(f"{layer}.{name}_layernorm.weight", hidden))

    output = weights.take_linear(
        f"{attention}.o_proj", hidden, config.num_heads * config.head_size, config.output_bias
    )
    gate_up = _stacked(
        weights,
        f"{layer}.mlp.gate_up_proj",
        {f"{layer}.mlp.gate_proj": inner, f"{layer}.mlp.up_proj": inner},
        hidden,
        config.mlp_bias,
    )
    gate_up = gate_up.reordered(gate_up_order(config))
    down = weights.take_linear(f"{layer}.mlp.down_proj", hidden, inner, config.mlp_bias)
    qkv, own = own_heads(_qkv(weights, attention, config), config, ops), heads(config, ops)
    first, last = (own.size * count for count in (own.num_q, own.num_q + own.num_kv))
    kept = kept_elements(None if qkv.bias is None else qkv.bias[first:last], own.num_kv)
    return DecoderLayer(
        qkv=ops.pack(qkv),
        output=ops.pack(attended(output, config, ops)),
        post_norm=norm("post_attention") if config.pre_norms else None,
        gate_up=ops.pack_gate_up(share.halves(gate_up)),
        down=ops.pack(share.inputs(down)),
        after_norm=after_norm,
        heads=own,
        norms=_head_norms(weights, attention, config, ops) if config.head_norms else None,
        scale=config.head_size**-0.5,
        window=config.windows[i],
        eps=config.rms_norm_eps,
        attention_norm=norm("post_self_attn") if config.post_norms else None,
        mlp_norm=norm("post_mlp") if config.post_norms else None,
        row_norms=_row_norms(weights, attention, config, ops) if config.row_norms else None,
        kept=kept,
    )


def heads(config: DecoderConfig, ops: BaseOps) -> Heads:
    """Those that one rank computes in each layer, filled up with zeros to the size that attention wants. Where heads
    have norms they are as the model has them: a norm would count the zeros."""
    own = ops.share.heads(config)
    if config.head_norms or config.row_norms:
        return own
    return replace(own, size=ops.head_width(own.size))


def own_heads(qkv: LinearWeight, config: DecoderConfig, ops: BaseOps) -> LinearWeight:
    """Of a layer of all queries, keys and values the outputs that are `heads`."""
    own, size = heads(config, ops), config.head_size
    count = own.num_q + 2 * own.num_kv
    places = head_places(count, size, own.size)
    return ops.share.fused(qkv, config).spread("out", places, count * own.size)


def attended(output: LinearWeight, config: DecoderConfig, ops: BaseOps) -> LinearWeight:
    """Of a layer whose inputs are what attention gives, the inputs that are of `heads`."""
    own = heads(config, ops)
    places = head_places(own.num_q, config.head_size, own.size)
    return ops.share.inputs(output).spread("in", places, own.num_q * own.size)


def _qkv(weights: LanguageWeights, attention: str, config: DecoderConfig) -> LinearWeight:
    """Queries, keys and values of all heads as `Heads` says, in the order in which they are rotated."""
    sizes = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    parts = {
        f"{attention}.{name}_proj": heads * config.head_size
        for name, heads in zip("qkv", sizes, strict=True)
    }
    fused = f"{attention}.qkv_proj"
    stacked = _stacked(weights, fused, parts, config.hidden_size, config.qkv_bias)
    return stacked.reordered(qkv_order(config))


def gate_up_order(config: DecoderConfig) -> list[int]:
    """Of each row of a layer's gates above what they gate the row of the stored ones."""
    inner = config.intermediate_size
    gates, gated = range(inner), range(inner, 2 * inner)
    return [*gated, *gates] if config.up_first else [*gates, *gated]


def qkv_order(config: DecoderConfig) -> list[int]:
    """Of each row of a layer's fused queries, keys and values the row of the stored ones."""
    size, share = config.head_size, config.num_heads // config.num_kv_heads
    heads = list(range(config.num_heads + 2 * config.num_kv_heads))
    if config.qkv_by_head:
        groups = [heads[first : first + share + 2] for first in heads[:: share + 2]]
        queries = [head for group in groups for head in group[:share]]
        heads = [*queries, *(group[-2] for group in groups), *(group[-1] for group in groups)]
    turned = config.num_heads + config.num_kv_heads
    order = head_order(config.rope)
    return [head * size + place for head in heads[:turned] for place in order] + [
        head * size + place for head in heads[turned:] for place in range(size)
    ]


def _head_norms(
    weights: LanguageWeights, attention: str, config: DecoderConfig, ops: BaseOps
) -> HeadNorms:
    order = head_order(config.rope)
    q, k = (
        ops.vector(weights.take(f"{attention}.{name}_norm.weight", config.head_size)[order])
        for name in "qk"
    )
    return HeadNorms(q, k, config.rms_norm_eps)


def _row_norms(
    weights: LanguageWeights, attention: str, config: DecoderConfig, ops: BaseOps
) -> HeadNorms:
    queries, keys = (heads * config.head_size for heads in (config.num_heads, config.num_kv_heads))
    q = weights.take(f"{attention}.q_norm.weight", queries)
    k = weights.take(f"{attention}.k_norm.weight", keys)
    order = qkv_order(config)
    q, k = q[order[:queries]], k[[place - queries for place in order[queries : queries + keys]]]
    return HeadNorms(ops.vector(q), ops.vector(k), config.rms_norm_eps)


def _stacked(
    weights: LanguageWeights, fused: str, parts: Mapping[str, int], inputs: int, bias: bool
) -> LinearWeight:
    """Linear layers of the same inputs as one: `fused` where it is stored so, else the parts, of so many outputs."""
    if weights.has_linear(fused):
        return weights.take_linear(fused, sum(parts.values()), inputs, bias)
    return StackedWeight(
        [weights.take_linear(name, out, inputs, bias) for name, out in parts.items()]
    )
