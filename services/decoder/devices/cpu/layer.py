"""A whole decoder layer as one call of the kernels: for a few rows, what Python does between eight calls
takes as long as a small linear layer."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.decoder.devices.base.decoder_layer import DecoderLayer
from services.decoder.steps.attention_meta import AttnMeta
from shared.cpu_kernels import binding
from shared.cpu_kernels.packed_linear import PackedLinear


@dataclass(frozen=True)
class LayerCall:
    """A layer as the kernels get it. `whole`: one call does all of it, because no rows need padding between its linear
    layers, no other rank has a part of it, and it has the norms that the kernels have; `widths`: of what `qkv` and
    `gate_up` give."""

    call: binding.Layer
    whole: bool
    widths: tuple[int, int]


def make_call(
    layer: DecoderLayer,
    qkv: PackedLinear,
    output: PackedLinear,
    gate_up: PackedLinear,
    down: PackedLinear,
    *,
    alone: bool,
) -> LayerCall:
    """`layer`, whose weights the others are, must outlive what is done with it. alone: without other ranks."""
    norms, linears = layer.norms, (qkv, output, gate_up, down)
    call = binding.Layer(
        *(linear.call for linear in linears),
        _address(layer.post_norm),
        _address(layer.after_norm),
        None if norms is None else norms.q.data_ptr(),
        None if norms is None else norms.k.data_ptr(),
        layer.window or 0,
        layer.eps,
    )
    whole = alone and layer.attention_norm is None and layer.mlp_norm is None
    whole &= layer.row_norms is None
    whole &= layer.post_norm is not None and layer.after_norm is not None
    whole &= all(linear.inputs == linear.call.inputs for linear in linears)
    return LayerCall(call, whole, (qkv.outputs, gate_up.outputs))


def _address(norm: Tensor | None) -> int | None:
    return None if norm is None else norm.data_ptr()


@dataclass(frozen=True)
class LayerStep:
    """What all layers of a step share: rows, memory for intermediate results, the batch."""

    normed: Tensor
    residual: Tensor
    cos: Tensor
    widths: tuple[int, int]
    kept: tuple[object, ...]  # memory that the call points to
    call: binding.LayerStep

    def fits(self, normed: Tensor, residual: Tensor, cos: Tensor, widths: tuple[int, int]) -> bool:
        """Whether this is the step of these rows."""
        same = self.normed is normed and self.residual is residual and self.cos is cos
        return same and self.widths == widths


def make_step(
    normed: Tensor,
    residual: Tensor,
    layer: DecoderLayer,
    widths: tuple[int, int],
    cos: Tensor,
    sin: Tensor,
    meta: AttnMeta,
    tasks: "np.ndarray[tuple[int, int], np.dtype[np.int32]]",
) -> LayerStep:
    """normed, residual: [T, H], contiguous; both are overwritten by every layer."""
    rows, heads = normed.shape[0], layer.heads
    dtype, width = normed.dtype, heads.num_q * heads.size
    qkv = torch.empty((rows, widths[0]), dtype=dtype)
    # Rows of padding belong to no task.
    mixed = (torch.zeros if rows > meta.cu_q[-1] else torch.empty)((rows, width), dtype=dtype)
    gated = torch.empty((rows, widths[1]), dtype=dtype)
    rope = binding.RopeWrite(
        qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), meta.slots.data_ptr(),
        None, None, rows, heads.num_q, layer.eps, 0,
    )  # fmt: skip
    attention = binding.Attention(
        qkv.data_ptr(), mixed.data_ptr(), qkv.stride(0), width,
        meta.block_table.data_ptr(), meta.block_table.stride(0), tasks.ctypes.data, len(tasks),
        heads.num_q, layer.scale, 0.0, 0, None,
    )  # fmt: skip
    call = binding.LayerStep(
        rope, attention, normed.data_ptr(), residual.data_ptr(), gated.data_ptr(), rows
    )
    kept = (qkv, mixed, gated, sin, meta.slots, meta.block_table, tasks)
    return LayerStep(normed, residual, cos, widths, kept, call)
