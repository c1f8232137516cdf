"""A small configuration of the same kind: fewer heads, layers and experts, all switches as they are."""

import copy
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from transformers import PreTrainedConfig

_WIDTHS = ("hidden_size", "embed_dim", "d_model", "n_embd", "width", "dim")
_HEADS = ("num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads")
_KV_HEADS = ("num_key_value_heads", "n_kv_heads", "num_kv_heads")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "num_experts_per_token")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
# Sizes that may be those of another part's rows, and sizes that are nobody else's.
_SHARED = re.compile(r"(hidden|dim|width|embed|hidden_size|n_embd|d_model|size|channels)$")
_OTHERS = re.compile(r"image|patch|vocab|position|window|token|head_dim|rope|crop|kernel|stride")
_INNER = re.compile(r"intermediate|ffn_dim|ffn_hidden|n_inner|mlp_dim")
_INNER_SIZE = 128
_FEW_LAYERS, _FEW_EXPERTS = 4, 8


def smaller(config: PreTrainedConfig, *, widths: bool, layers: bool) -> PreTrainedConfig:
    """A copy. `widths`: parts with fewer heads, of the same size each; `layers`: the text model with fewer layers, of
    every kind that it has. Experts are few in both."""
    found = copy.deepcopy(config)
    parts = list(_parts(found))
    if widths:
        _narrow(parts)
        _join_outputs(parts)
    if layers:
        _shorten(found.get_text_config(decoder=True))
    for part in parts:
        _thin(part)
    return found


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            yield from _parts(part)


def _narrow(parts: list[Any]) -> None:
    """Heads stay as wide as they are. Parts of one width stay so, and numbers elsewhere that are this width."""
    shares: dict[int, Fraction] = {}
    for part in parts:
        width, heads = _first(part, _WIDTHS), _first(part, _HEADS)
        if width and heads:
            share = _share(width, heads)
            shares[width] = max(share, shares.get(width, share))
    widths = {width: int(width * share) for width, share in shares.items()}
    for part in parts:
        width, heads = _first(part, _WIDTHS), _first(part, _HEADS)
        if width and heads:
            share = shares[width]
            fewer = heads * share
            if fewer.denominator != 1:
                continue
            kv = _first(part, _KV_HEADS)
            _set(part, _HEADS, int(fewer))
            if kv:
                _set(part, _KV_HEADS, int(fewer) if kv == heads else 1)
        for name, value in part.to_dict().items():
            if type(value) is not int or _OTHERS.search(name):
                continue
            if value in widths and _SHARED.search(name) and not _INNER.search(name):
                setattr(part, name, widths[value])


def _join_outputs(parts: list[Any]) -> None:
    """Rows of a tower that are those of its last layer and of some others beside each other."""
    for part in parts:
        if hasattr(part, "vision_output_dim"):
            outputs = 1 + len(part.intermediate_layers_indices)
            part.vision_output_dim = outputs * _first(part, _WIDTHS)


def _share(width: int, heads: int) -> Fraction:
    """Of two heads, or of as few more as the width can be divided by."""
    for fewer in range(2, heads):
        if heads % fewer == 0 and width * fewer % heads == 0 and width * fewer // heads % 8 == 0:
            return Fraction(fewer, heads)
    return Fraction(1)


def _thin(part: Any) -> None:
    for name, value in part.to_dict().items():
        if _INNER.search(name) and type(value) is int and value > _INNER_SIZE:
            setattr(part, name, _INNER_SIZE)
        if _INNER.search(name) and isinstance(value, list):
            cut = [min(one, _INNER_SIZE) if type(one) is int else one for one in value]
            setattr(part, name, cut)
    experts, groups = _first(part, _EXPERTS), getattr(part, "n_group", None) or 1
    least = max(_FEW_EXPERTS, 2 * (_first(part, _CHOSEN) or 1))
    if experts and experts > least and groups == 1:
        _set(part, _EXPERTS, least)


def _shorten(text: Any) -> None:
    """The first layers, until each kind that a list names has come."""
    layers = _first(text, _LAYERS) or 0
    lists = {
        name: value
        for name, value in text.to_dict().items()
        if isinstance(value, list) and len(value) == layers
    }
    kept = _FEW_LAYERS
    for value in lists.values():
        kinds = [str(one) for one in value]
        kept = max(kept, *(kinds.index(kind) + 1 for kind in set(kinds)))
    kept = max(kept, int(getattr(text, "first_k_dense_replace", None) or 0) + 2)
    if kept >= layers:
        return
    _set(text, _LAYERS, kept)
    for name, value in lists.items():
        setattr(text, name, value[:kept])


def _first(part: Any, names: tuple[str, ...]) -> int:
    found = (getattr(part, name, None) for name in names)
    return next((value for value in found if type(value) is int and value > 0), 0)


def _set(part: Any, names: tuple[str, ...], value: int) -> None:
    name = next(name for name in names if type(getattr(part, name, None)) is int)
    setattr(part, name, value)
