"""Linear layers over weights that were packed once, for whoever computes on a CPU."""

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.cpu_kernels import binding
from shared.cpu_kernels.binding import Kernels
from shared.cpu_kernels.host_memory import lasting_zeros
from shared.weights.quantized_weight import Numbers

# Element types that the kernels know, by their numbers there.
TYPES = {torch.float32: 0, torch.bfloat16: 1}
_PART = 1 << 22  # elements of a weight that are packed at a time


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
    outputs, inputs = weight.shape
    panels = _Panels(kernels, weight.dtype, outputs, inputs, epilogue)
    panels.fill(0, weight)
    return panels.packed(bias)


def pack_parts(
    kernels: Kernels,
    read: Callable[[Numbers], Tensor],
    shape: tuple[int, int],
    dtype: torch.dtype,
    bias: Tensor | None,
    epilogue: int = binding.PLAIN,
) -> PackedLinear:
    """`pack` of a weight [out, in] of which no more than a few panels are there at a time; read: gives some of its rows
    in `dtype`, each of them once."""
    outputs, inputs = shape
    panels = _Panels(kernels, dtype, outputs, inputs, epilogue)
    for first, rows in panel_parts(kernels, outputs, inputs, epilogue):
        panels.fill(first, read(rows))
    return panels.packed(bias)


def panel_parts(
    kernels: Kernels, outputs: int, inputs: int, epilogue: int
) -> Iterator[tuple[int, Numbers]]:
    """Of a weight [outputs, inputs] the rows of some panels that follow each other, by the first one's number. For
    SWIGLU half of them are gates, followed by what they gate."""
    halves = 2 if epilogue == binding.SWIGLU else 1
    width = kernels.panel // halves
    count = outputs // halves
    each = max(1, _PART // max(1, inputs * kernels.panel))
    for first in range(0, count_panels(kernels, count, epilogue), each):
        rows = np.arange(first * width, min(count, (first + each) * width))
        yield first, np.concatenate([rows + half * count for half in range(halves)])


class _Panels:
    """Memory for the panels of a weight [outputs, inputs], for SWIGLU gates and what they gate."""

    def __init__(
        self, kernels: Kernels, dtype: torch.dtype, outputs: int, inputs: int, epilogue: int
    ) -> None:
        self._kernels, self._kind, self._epilogue = kernels, TYPES[dtype], epilogue
        self._halves = 2 if epilogue == binding.SWIGLU else 1
        self._outputs, self._inputs = outputs // self._halves, inputs
        self._whole = inputs + (inputs & self._kind)  # bfloat16 goes in pairs
        step = kernels.step
        steps = -(-self._whole // step) * step if self._kind else self._whole
        count = count_panels(kernels, self._outputs, epilogue)
        self._memory = lasting_zeros((count, steps * kernels.panel), dtype)

    def fill(self, first: int, weight: Tensor) -> None:
        """Panels from number `first` on, with as many rows as they have."""
        rows = weight.contiguous()
        if self._whole != self._inputs:
            rows = torch.nn.functional.pad(rows, (0, 1))
        outputs, to = len(rows) // self._halves, self._memory[first:]
        self._kernels.pack(
            self._kind, rows.data_ptr(), outputs, self._whole, self._epilogue, to.data_ptr()
        )

    def packed(self, bias: Tensor | None) -> PackedLinear:
        """The layer, once all panels are filled."""
        sizes = self._whole, self._outputs, self._epilogue
        made = make_packed(self._kernels, self._memory, bias, *sizes)
        return replace(made, inputs=self._inputs)


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
