"""Linear layers over weights that were packed once, for whoever computes on a CPU."""

import ctypes
from dataclasses import dataclass, replace

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


def gate_and_up(kernels: Kernels, x: Tensor, layer: PackedLinear) -> Tensor:
    """float32 [rows, 2, out]: of a layer packed for SWIGLU the sums before one half of them gates the other."""
    panels = layer.panels.shape[0]
    call = binding.Linear.from_buffer_copy(layer.call)
    call.outputs, call.epilogue = panels * kernels.panel, binding.PLAIN
    call.result = binding.WIDE
    plain = replace(layer, call=call, views=(ctypes.byref(call),))
    sums = torch.empty((x.shape[0], panels * kernels.panel))
    linear(kernels, x, plain, sums)
    halves = sums.view(-1, panels, 2, kernels.lanes).transpose(1, 2)
    return halves.reshape(-1, 2, panels * kernels.lanes)[..., : layer.outputs]


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
