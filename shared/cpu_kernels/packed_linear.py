"""Linear layers over weights that were packed once, for whoever computes on a CPU."""

import ctypes
from dataclasses import dataclass, replace
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
    kernels get; `views`: the same for each kind of result; `kept`: what it points to besides."""

    panels: Tensor
    bias: Tensor | None
    inputs: int
    outputs: int
    call: binding.Linear
    views: "tuple[ctypes._CArgObject, ...]"
    kept: tuple[object, ...] = ()

    def keeping(self, *kept: object) -> "PackedLinear":
        """The same, which keeps these too."""
        return replace(self, kept=(*self.kept, *kept))

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        tensors = (self.panels, self.bias, *self.kept)
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


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
    panels = count_panels(kernels, outputs, epilogue)
    steps = -(-whole // kernels.step) * kernels.step if kind else whole
    memory = zeros_in_huge_pages((panels, steps * kernels.panel), weight.dtype, touch=False)
    kernels.pack(kind, rows.data_ptr(), outputs, whole, epilogue, memory.data_ptr())
    packed = make_packed(kernels, memory, bias, whole, outputs, epilogue)
    return replace(packed, inputs=inputs)


def count_panels(kernels: Kernels, outputs: int, epilogue: int) -> int:
    """Panels of a layer with so many outputs, for SWIGLU gated ones."""
    width = kernels.lanes if epilogue == binding.SWIGLU else kernels.panel
    return -(-outputs // width)


def make_packed(
    kernels: Kernels,
    memory: Tensor,
    bias: Tensor | None,
    inputs: int,
    outputs: int,
    epilogue: int,
    quantized: binding.Quantized | None = None,
) -> PackedLinear:
    """The layer whose weight the panels in `memory` are; quantized: what codes in them mean, for the caller to keep."""
    padded = None
    if bias is not None:
        padded = arrange(kernels, bias.float()[:, None], epilogue, outputs).flatten()
    layer = binding.Linear(
        memory.data_ptr(),
        None if padded is None else padded.data_ptr(),
        inputs,
        outputs,
        epilogue,
        binding.SAME,
        None if quantized is None else ctypes.addressof(quantized),
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


def arrange(kernels: Kernels, values: Tensor, epilogue: int, outputs: int) -> Tensor:
    """Of values [rows of a weight, n] those of each panel's columns: [panels, n, panel], zeros for padding."""
    halves = 2 if epilogue == binding.SWIGLU else 1
    panels, count = count_panels(kernels, outputs, epilogue), values.shape[1]
    padded = values.new_zeros((halves, panels * kernels.panel // halves, count))
    padded[:, :outputs] = values.view(halves, outputs, count)
    split = padded.view(halves, panels, -1, count)
    return split.permute(1, 3, 0, 2).reshape(panels, count, kernels.panel).contiguous()
