"""What a tower's layers are made of, on the kernels. Every row is bit-equal whatever else runs with it."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.vision_encoder.devices.base.ops import (
    Norm,
    Packed,
    Rotation,
    Segments,
    TowerOps,
    activated,
)
from shared.cpu_kernels import binding, packed_linear
from shared.cpu_kernels.binding import Kernels
from shared.cpu_kernels.packed_linear import TYPES, PackedLinear
from shared.weights.linear_weight import LinearWeight

# Queries that one attention task handles: whole groups by vectors (12 rows) and by tiles (32).
_TASK_QUERIES = 96

# What the kernels do as part of a linear layer: by transformers' names, and whether it is gated.
_EPILOGUES = {
    ("", False): binding.PLAIN,
    ("gelu", False): binding.GELU,
    ("gelu_pytorch_tanh", False): binding.GELU_TANH,
    ("gelu_new", False): binding.GELU_TANH,
    ("quick_gelu", False): binding.QUICK_GELU,
    ("silu", True): binding.SWIGLU,
}


@dataclass(frozen=True)
class _PackedPanels(Packed):
    """`weight` and `bias` are those of `layer`; activation and gate are what it does not do itself."""

    layer: PackedLinear | None = None


class _CachedSegments(Segments):
    """Segments, and buffers for their keys.

    One object serves all layers of a call: each overwrites the buffers of the one before. The padding behind a
    segment stays zero.
    """

    def __init__(
        self, kernels: Kernels, lengths: Sequence[int], heads: int, size: int, dtype: torch.dtype
    ) -> None:
        """lengths: tokens of each; size: elements of a head."""
        super().__init__(lengths, size)
        page, lanes = kernels.page, kernels.lanes
        sizes = np.asarray(lengths, np.int64)
        blocks = -(-sizes // page)
        first = np.cumsum(blocks) - blocks
        starts = np.cumsum(sizes) - sizes
        places = np.arange(int(sizes.sum())) - np.repeat(starts, sizes)
        self.slots = torch.from_numpy(np.repeat(first * page, sizes) + places)
        table = first[:, None] + np.arange(int(blocks.max()))
        self.table = torch.from_numpy(table.astype(np.int32))
        self.tasks = torch.tensor(
            [
                (row, int(starts[row]) + begin, min(_TASK_QUERIES, length - begin), begin, length)
                for row, length in enumerate(lengths)
                for begin in range(0, length, _TASK_QUERIES)
            ],
            dtype=torch.int32,
        )
        padded = -(-size // lanes) * lanes
        shape = (int(blocks.sum()), heads, 1, 2, page * padded)
        self._memory = torch.zeros(shape, dtype=dtype)
        self.cache = ctypes.byref(binding.Cache(self._memory.data_ptr(), 1, heads, padded, size))


class KernelOps(TowerOps):
    """The kernels for one element type. Rows are contiguous [tokens, size]; results are new memory."""

    def __init__(self, device: torch.device, dtype: torch.dtype, kernels: Kernels) -> None:
        super().__init__(device, dtype)
        self._kernels = kernels
        self._type = TYPES[dtype]

    @property
    def arithmetic(self) -> str:
        """What the bits of the kernels depend on, beside the version of their arithmetic."""
        return self._kernels.arithmetic

    def _pack_weight(self, weight: LinearWeight, activation: str, gated: bool) -> Packed:
        """In panels, a few at a time; an activation that the kernels know is done with the product."""
        epilogue = _EPILOGUES.get((activation, gated))
        if epilogue is not None:
            activation, gated = "", False
        bias = None if weight.bias is None else weight.bias.to(self.dtype)
        made = packed_linear.pack_parts(
            self._kernels,
            lambda rows: weight.select(rows, None, self.dtype),
            (weight.out, weight.inputs),
            self.dtype,
            bias,
            epilogue or binding.PLAIN,
        )
        return _PackedPanels(made.panels, made.bias, activation, gated, made)

    def segments(self, lengths: Sequence[int], heads: int, size: int) -> Segments:
        """With memory for the keys and values of a layer."""
        return _CachedSegments(self._kernels, lengths, heads, size, self.dtype)

    def linear(self, x: Tensor, layer: Packed) -> Tensor:
        """[tokens, in] to [tokens, out], or half of it for a gated layer."""
        assert isinstance(layer, _PackedPanels) and layer.layer is not None
        out = torch.empty((x.shape[0], layer.layer.outputs), dtype=self.dtype)
        packed_linear.linear(self._kernels, x, layer.layer, out)
        if not layer.activation:
            return out
        # Row by row: where torch's vectors begin must not depend on how many rows there are.
        return torch.stack([activated(row, layer.activation, layer.gated) for row in out])

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Of each row."""
        if norm.bias is not None:
            return self._layer_norm(None, x, norm)
        out = torch.empty_like(x)
        self._kernels.rms_norm(
            self._type, x.data_ptr(), norm.weight.data_ptr(), norm.eps, *x.shape, out.data_ptr()
        )
        return out

    def add_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """One pass over the rows; the sum lies where `residual` did."""
        if norm.bias is not None:
            return self._layer_norm(x, residual, norm), residual
        out = torch.empty_like(residual)
        self._kernels.add_rms_norm(
            self._type, x.data_ptr(), residual.data_ptr(), norm.weight.data_ptr(), norm.eps,
            *residual.shape, out.data_ptr(),
        )  # fmt: skip
        return out, residual

    def _layer_norm(self, x: Tensor | None, residual: Tensor, norm: Norm) -> Tensor:
        assert norm.bias is not None
        out = torch.empty_like(residual)
        self._kernels.add_layer_norm(
            self._type, None if x is None else x.data_ptr(), residual.data_ptr(),
            norm.weight.data_ptr(), norm.bias.data_ptr(), norm.eps, *residual.shape, out.data_ptr(),
        )  # fmt: skip
        return out

    def attention(
        self, qkv: Tensor, heads: int, segments: Segments, rotation: Rotation | None
    ) -> Tensor:
        """[tokens, 3 * heads * size] to [tokens, heads * size]; rotates the queries in place."""
        assert isinstance(segments, _CachedSegments)
        tokens, width = qkv.shape[0], qkv.shape[1] // 3
        out = torch.empty((tokens, width), dtype=qkv.dtype)
        write = binding.RopeWrite(
            qkv.data_ptr(),
            None if rotation is None else rotation.cos.data_ptr(),
            None if rotation is None else rotation.sin.data_ptr(),
            segments.slots.data_ptr(),
            None,
            None,
            tokens,
            heads,
            0.0,
            1,
        )
        self._kernels.rope_write(self._type, write, segments.cache)
        call = binding.Attention(
            qkv.data_ptr(),
            out.data_ptr(),
            3 * width,
            width,
            segments.table.data_ptr(),
            segments.table.stride(0),
            segments.tasks.data_ptr(),
            len(segments.tasks),
            heads,
            (width // heads) ** -0.5,
            0.0,
            0,
            None,
        )
        self._kernels.attention(self._type, call, segments.cache)
        return out
