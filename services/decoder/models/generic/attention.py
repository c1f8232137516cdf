"""The attention function that a transformers model calls in every layer: over the pages of the running step."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from services.decoder.devices.base.ops import BaseOps
from services.decoder.models.kept_keys import LARGE_BIAS, Kept, kept_elements
from services.decoder.models.layer_spec import Paged
from services.decoder.steps.attention_meta import AttnMeta, PagedKV
from shared import kv_cache_dtype

NAME = "tessera"  # as an attention implementation of transformers


class NotServed(Exception):
    """What a layer asks of attention is not served; the message says which layer and what."""


class FirstLayersOnly(Exception):
    """There is no cache for the layer that is reached: only the layers before it were to run."""


@dataclass(frozen=True)
class LayerCall:
    """What one layer hands over: q [heads, T, K], k [KV heads, T, K], v [KV heads, T, V], and how to attend.
    module: its attention."""

    layer: int
    module: torch.nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    window: int | None
    chunk: int | None
    softcap: float | None
    sinks: Tensor | None
    masked: bool  # whether a mask came along, which says something that no argument says


class Attention(Protocol):
    """What answers the calls of a forward: [T, heads, V]."""

    def __call__(self, call: LayerCall) -> Tensor: ...


_running: ContextVar[Attention] = ContextVar("attention of the running step")


@contextmanager
def answering(attention: Attention) -> Iterator[None]:
    """Calls of the layers go to `attention` meanwhile, in this thread."""
    token = _running.set(attention)
    try:
        yield
    finally:
        _running.reset(token)


@dataclass
class PagedAttention:
    """Writes and reads the caches of a step, in one forward: the first call's is the first."""

    ops: BaseOps
    meta: AttnMeta
    caches: Sequence[PagedKV]
    calls: int = 0

    def __call__(self, call: LayerCall) -> Tensor:
        place = self.calls
        self.calls += 1
        if place >= len(self.caches):
            raise FirstLayersOnly
        q, k, v = (x.transpose(0, 1) for x in (call.q, call.k, call.v))
        width = v.shape[-1]
        if k.shape[-1] != width:
            q, k, v = _widened(q, k, v)
        q, k, v, cache = q.contiguous(), k.contiguous(), v.contiguous(), self.caches[place]
        self.ops.kv_write(k, v, cache, self.meta)
        out = self.ops.paged_attention(
            q,
            k,
            v,
            cache,
            self.meta,
            scale=call.scale,
            window=call.window,
            chunk=call.chunk,
            softcap=call.softcap,
            sinks=call.sinks,
        )
        return out[..., :width]


def _widened(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Heads whose keys and values are of one size, filled up with zeros: the scores stay what they are."""
    size = max(k.shape[-1], v.shape[-1])
    return tuple(F.pad(x, (0, size - x.shape[-1])) for x in (q, k, v))  # type: ignore[return-value]


@dataclass
class LayerRecord:
    """Attends to nothing; remembers what each call of a layer keeps, in the order of the calls. coded: as codes."""

    dtype: torch.dtype
    coded: bool = False
    layers: list[Paged] = field(default_factory=list)

    def __call__(self, call: LayerCall) -> Tensor:
        """Raises NotServed for a layer that brings a mask."""
        if call.masked:
            raise NotServed(f"layer {call.layer} masks its attention by itself")
        heads, tokens, _ = call.k.shape
        size = max(call.k.shape[-1], call.v.shape[-1])
        kept = _kept(call, heads) if self.coded else ()
        self.layers.append(
            Paged(
                heads,
                size,
                size,
                self.dtype,
                call.window,
                call.chunk,
                coded=self.coded,
                kept=kept,
            )
        )
        return call.v.new_zeros((tokens, call.q.shape[0], call.v.shape[-1]))


def _kept(call: LayerCall, heads: int) -> Kept:
    """What is kept of the layer's keys beside their codes, however its class rotates them. Raises InvalidRequest for
    large biases of which nothing says whether they are the keys'."""
    found = getattr(call.module, "k_proj", None)
    if found is not None:
        bias = getattr(found, "bias", None)
        whole = bias is not None and bias.numel() == heads * call.k.shape[-1]
        return kept_elements(bias if whole else None, heads, ("half", "next"))
    for name, part in call.module.named_modules():
        bias = getattr(part, "bias", None)
        if isinstance(bias, Tensor) and bias.numel() and bias.abs().max() > LARGE_BIAS:
            raise kv_cache_dtype.refused(
                kv_cache_dtype.INT8,
                f"{name} of layer {call.layer} has biases above {LARGE_BIAS:g}, which may be those of keys; leave the"
                " flag away",
            )
    return ()


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The signature is transformers': query [1, heads, T, K]; the result is [1, T, heads, V]."""
    layer = getattr(module, "layer_idx", None)
    name = type(module).__name__
    if layer is None:
        raise NotServed(f"{name} does not say which layer it is")
    if position_bias is not None:
        raise NotServed(f"{name} of layer {layer} adds a bias to its scores")
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise NotServed(f"{name} of layer {layer} attends to something else than its own tokens")
    window, chunk = _reach(module, layer, sliding_window)
    call = LayerCall(
        layer,
        module,
        query[0],
        key[0],
        value[0],
        query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window,
        chunk,
        softcap,
        s_aux,
        attention_mask is not None,
    )
    return _running.get()(call)[None], None


def _reach(
    module: torch.nn.Module, layer: int, sliding_window: int | None
) -> tuple[int | None, int | None]:
    """Window and chunk of a layer. Some classes leave both to masks, which are made by `layer_types`."""
    config: Any = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None) or ()
    kind = kinds[layer] if layer < len(kinds) else ""
    window = sliding_window if isinstance(sliding_window, int) else None
    if window is None and kind == "sliding_attention":
        window = config.sliding_window
    chunk = config.attention_chunk_size if kind == "chunked_attention" else None
    return window, chunk


AttentionInterface.register(NAME, _attend)
