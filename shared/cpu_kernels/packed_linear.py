"""Linear layers over weights that were packed once, for whoever computes on a CPU."""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shared.cpu_kernels import binding
from shared.cpu_kernels.binding import Kernels
from shared.cpu_kernels.host_memory import zeros_in_huge_pages

# Element types that the kernels know, by their numbers there.
TYPES = {torch.float32: 0, torch.bfloat16: 1}


@dataclass(frozen=True)
class PackedLinear:
    """`panels`: the weight; `bias`: float32, one for each of the panels' columns; `call`: what the
    kernels get; `views`: the same for each kind of result."""

    panels: Tensor
    bias: Tensor | None
    inputs: int
    outputs: int
    call: binding.Linear
    views: "tuple[ctypes._CArgObject, ...]"


def pack(
    kernels: Kernels, weight: Tensor, bias: Tensor | None, epilogue: int = binding.PLAIN
) -> PackedLinear:
    """Packs [out, in] of float32 or bfloat16 in panels of outputs, in huge pages (`linear.h`).

    epilogue: what becomes of the sums. For SWIGLU the first half of the rows gates the second.
    """
    kind = TYPES[weight.dtype]
    outputs = weight.shape[0] // (2 if epilogue == binding.SWIGLU else 1)
    rows, inputs = weight.contiguous(), weight.shape[1]
    whole = inputs + (inputs & kind)  # bfloat16 goes in pairs
    if whole != inputs:
        rows = torch.nn.functional.pad(rows, (0, 1))
    width = kernels.lanes if epilogue == binding.SWIGLU else kernels.panel
    panels = -(-outputs // width)
    steps = -(-whole // kernels.step) * kernels.step if kind else whole
    memory = zeros_in_huge_pages((panels, steps * kernels.panel), weight.dtype, touch=False)
    kernels.pack(kind, rows.data_ptr(), outputs, whole, epilogue, memory.data_ptr())
    padded = None
    if bias is not None:
        padded = _pack_bias(kernels, bias.float(), epilogue, outputs, panels)
    layer = binding.Linear(
        memory.data_ptr(),
        None if padded is None else padded.data_ptr(),
        whole,
        outputs,
        epilogue,
        binding.SAME,
    )
    views = [layer]
    for result in (binding.WIDE, binding.LARGEST):
        view = binding.Linear.from_buffer_copy(layer)
        view.result = result
        views.append(view)
    return PackedLinear(memory, padded, inputs, outputs, layer, tuple(map(ctypes.byref, views)))


def linear(
    kernels: Kernels, x: Tensor, layer: PackedLinear, out: Tensor, result: int = binding.SAME
) -> Tensor:
    """Fills `out` with what the layer makes of rows [rows, in], of the weight's type and contiguous."""
    kind = TYPES[x.dtype]
    if x.shape[1] & kind:
        x = torch.nn.functional.pad(x, (0, 1))
    kernels.linear(
        kind,
        layer.views[result],
        x.data_ptr(),
        out.data_ptr(),
        x.shape[0],
        x.stride(0),
        out.shape[1],
    )
    return out


def adapted_linear(
    kernels: Kernels,
    x: Tensor,
    layer: PackedLinear,
    segments: binding.Segments,
    adapters: Any,
    out: Tensor,
) -> Tensor:
    """The same with what is added to the segments of rows, by the adapter of each, in the weight's type.

    adapters: addresses of `binding.Adapter`s, of which the first product's additions are meant.
    """
    kind = TYPES[x.dtype]
    if x.shape[1] & kind:
        x = torch.nn.functional.pad(x, (0, 1))
    kernels.adapted_linear(
        kind,
        layer.views[binding.SAME],
        segments,
        adapters,
        x.data_ptr(),
        out.data_ptr(),
        x.shape[0],
        x.stride(0),
        out.shape[1],
    )
    return out


def _pack_bias(kernels: Kernels, bias: Tensor, epilogue: int, outputs: int, panels: int) -> Tensor:
    """One number for each column of the panels."""
    if epilogue != binding.SWIGLU:
        padded = torch.zeros(panels * kernels.panel)
        padded[:outputs] = bias
        return padded
    halves = torch.zeros(2, panels * kernels.lanes)
    halves[:, :outputs] = bias.view(2, outputs)
    split = halves.view(2, panels, kernels.lanes)
    return split.transpose(0, 1).reshape(-1).contiguous()
