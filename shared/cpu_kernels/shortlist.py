"""The largest output of each row by way of a sketch of the weight (`shortlist.h`)."""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.cpu_kernels import binding
from shared.cpu_kernels.binding import Kernels
from shared.cpu_kernels.host_memory import lasting_zeros
from shared.cpu_kernels.packed_linear import TYPES, PackedLinear

MOST_ROWS = 4  # of one call
# Smaller weights stay in the caches anyway: bytes.
LEAST_BYTES = 8 << 20
_MOST_INPUTS = 1 << 16
_KNOWN = 3  # float32 for each column


@dataclass(frozen=True)
class Shortlist:
    """`sketch`: one byte for each element of the weight; `columns`: bounds; `call`: both, and what
    the kernel remembers from one call to the next."""

    sketch: Tensor
    columns: Tensor
    call: binding.Shortlist

    @property
    def num_bytes(self) -> int:
        """Memory that it takes beside the weight."""
        return self.sketch.numel() + self.columns.numel() * self.columns.itemsize


def make(kernels: Kernels, weight: Tensor) -> Shortlist | None:
    """The sketch of a weight [out, in]; None where reading it would save nothing."""
    outputs, inputs = weight.shape
    if outputs * inputs * weight.itemsize < LEAST_BYTES or inputs >= _MOST_INPUTS:
        return None
    rows = weight.contiguous()
    panel = kernels.panel
    panels, padded = -(-outputs // panel), -(-inputs // 4) * 4
    sketch = lasting_zeros((panels, padded * panel), torch.uint8)
    columns = torch.empty((panels, _KNOWN, panel))
    call = binding.Shortlist(sketch.data_ptr(), columns.data_ptr(), padded)
    kernels.sketch(TYPES[weight.dtype], rows.data_ptr(), outputs, inputs, ctypes.byref(call))
    return Shortlist(sketch, columns, call)


def largest(
    kernels: Kernels, x: Tensor, layer: PackedLinear, shortlist: Shortlist, out: Tensor
) -> Tensor:
    """`packed_linear.linear` for LARGEST, of at most `MOST_ROWS` rows."""
    kind = TYPES[x.dtype]
    if x.shape[1] & kind:
        x = torch.nn.functional.pad(x, (0, 1))
    kernels.largest(
        kind,
        layer.views[binding.LARGEST],
        ctypes.byref(shortlist.call),
        x.data_ptr(),
        out.data_ptr(),
        x.shape[0],
        x.stride(0),
    )
    return out
