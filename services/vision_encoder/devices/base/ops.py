"""The operations of towers in plain torch: the reference that each device's own are tested against.

Rows are contiguous [tokens, size]; results are new memory. A device overrides what it can do better.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F

from shared.artifacts.pixel_scaling import PixelScaling
from shared.weights.linear_weight import LinearWeight

_gelu_tanh = partial(F.gelu, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


# By transformers' names; the empty one is none.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "silu": F.silu,
}


@dataclass(frozen=True)
class Norm:
    """A layer norm, or without a bias an RMS norm: weights [size]."""

    weight: Tensor
    bias: Tensor | None
    eps: float


@dataclass(frozen=True)
class Rotation:
    """What turns the queries and keys of each token: the two tables of `rotary_table`, on the device."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class Packed:
    """A linear layer in the form its device wants: weight [out, in], bias [out]. What follows it: an activation, by
    transformers' names, and if it is `gated` a product: the activated first half of the outputs times the other."""

    weight: Tensor
    bias: Tensor | None
    activation: str = ""
    gated: bool = False


@dataclass
class Segments:
    """Stretches of a packed batch, of so many tokens each, that attend to themselves alone; heads of `size`."""

    lengths: Sequence[int]
    size: int


class TowerOps:
    """The operations on one device in one element type."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype

    @final
    def pack(self, weight: LinearWeight, activation: str = "", gated: bool = False) -> Packed:
        """Takes over a layer's weight and bias, and what follows it. Of one that is gated the first half of the outputs
        is the gate; `StackedWeight` makes one layer of several that see the same rows."""
        return self._pack_weight(weight, activation, gated)

    def _pack_weight(self, weight: LinearWeight, activation: str, gated: bool) -> Packed:
        """`pack`, for devices that read the weight in parts."""
        dense, bias = weight.dense(self.dtype), weight.bias
        bias = None if bias is None else bias.to(self.dtype)
        return self._pack_dense(dense, bias, activation, gated)

    def pack_qkv(self, weight: LinearWeight, heads: int) -> Packed:
        """`pack` for what makes queries, keys and values [3 * heads * size] of rows, for `attention` alone."""
        return self.pack(weight)

    def pack_output(self, weight: LinearWeight, heads: int) -> Packed:
        """`pack` for the layer behind `attention`."""
        return self.pack(weight)

    def _pack_dense(
        self, weight: Tensor, bias: Tensor | None, activation: str, gated: bool
    ) -> Packed:
        """[out, in] and a bias [out], of the ops' type and on the host. Neither is kept, nor written to."""
        bias = None if bias is None else bias.to(self.device, copy=True)
        return Packed(weight.to(self.device, copy=True).contiguous(), bias, activation, gated)

    def vector(self, weight: Tensor) -> Tensor:
        """Takes over a parameter that is no linear layer's, of any shape, such as a norm's weight [size] or a table of
        places [places, size], in the element type."""
        return weight.to(self.device, self.dtype, copy=True)

    def linear(self, x: Tensor, layer: Packed) -> Tensor:
        """[tokens, in] to [tokens, out], or half of it for a gated layer."""
        return activated(F.linear(x, layer.weight, layer.bias), layer.activation, layer.gated)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Of each row of [tokens, size]."""
        if norm.bias is None:
            return F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)
        return F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, norm.eps)

    def add_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """[tokens, size] each: the norm of `x + residual`, and that sum, which may lie where `residual` did."""
        residual += x
        return self.norm(residual, norm), residual

    def head_norm(self, norm: Norm, heads: int) -> Norm:
        """What `norm` has to be given for an RMS norm over all heads of the queries, or keys, from `pack_qkv`."""
        return norm

    def segments(self, lengths: Sequence[int], heads: int, size: int) -> Segments:
        """For a packed batch of stretches of so many tokens; size: elements of a head. It may serve all layers of a
        call, one after the other."""
        return Segments(lengths, size)

    def rotary_table(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Host tables for a `Rotation`, of cosines and sines [tokens, size] in float32 whose halves are equal."""
        half = sin.shape[1] // 2
        # With the sign of the rotation in the sines a roll of the halves is all that is left.
        return cos.contiguous(), torch.cat([-sin[:, :half], sin[:, half:]], dim=1)

    def attention(
        self, qkv: Tensor, heads: int, segments: Segments, rotation: Rotation | None
    ) -> Tensor:
        """[tokens, 3 * heads * size], queries before keys before values, to [tokens, heads * size]; `qkv` may be
        overwritten. The rotation is that of pairs (i, i + size / 2), in float32 (Su et al., 2021)."""
        q, k, v = qkv.unflatten(1, (3, heads, -1)).unbind(1)
        if rotation is not None:
            q, k = rotated(q, rotation), rotated(k, rotation)
        mixed, start = [], 0
        for length, equal in groupby(segments.lengths):
            count = len(list(equal))
            some = slice(start, start + count * length)
            start = some.stop
            apart = (rows[some].unflatten(0, (count, length)).transpose(1, 2) for rows in (q, k, v))
            mixed.append(F.scaled_dot_product_attention(*apart).transpose(1, 2).flatten(0, 1))
        return torch.cat(mixed).flatten(1)

    def scale_pixels(self, raw: Tensor, scaling: PixelScaling) -> Tensor:
        """uint8 [n, channels, m] as the values of the image processor, bit for bit, in the element type."""
        table = _pixel_table(scaling, raw.device, self.dtype)
        out = torch.empty(raw.shape, dtype=self.dtype, device=raw.device)
        for channel, entries in enumerate(table):
            places = raw[:, channel].reshape(-1).to(torch.int32)
            out[:, channel] = entries.index_select(0, places).view(len(raw), -1)
        return out


def activated(x: Tensor, activation: str, gated: bool) -> Tensor:
    """What follows a linear layer, see `Packed`: [tokens, out], or half of it where it is gated."""
    if not gated:
        return ACTIVATIONS[activation](x)
    gate, other = x.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * other


def rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """[tokens, heads, size] by the tables of `TowerOps.rotary_table`."""
    wide = x.float()
    turned = torch.roll(wide, x.shape[-1] // 2, -1)
    return (wide * rotation.cos[:, None] + turned * rotation.sin[:, None]).to(x.dtype)


@lru_cache(maxsize=4)
def _pixel_table(scaling: PixelScaling, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(scaling.table()).to(device, dtype)
