"""Linear layers over codes that were packed once (`quantized_linear.h`)."""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from shared.cpu_kernels import binding
from shared.cpu_kernels.binding import Kernels
from shared.cpu_kernels.host_memory import zeros_in_huge_pages
from shared.cpu_kernels.packed_linear import (
    PackedLinear,
    arrange,
    count_panels,
    make_packed,
    panel_parts,
)
from shared.weights.quantized_weight import Numbers, QuantizedWeight

_BYTES, _NIBBLES, _TABLE = 0, 1, 2
_SCALE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ZERO_BYTE = 128  # entries of a table are kept as so much more than they are
_MOST_INPUTS = 1 << 16  # of a group: sums stay within 32 bits


def can_pack(weight: QuantizedWeight) -> bool:
    """Whether the kernels multiply with these codes: all but those of a table of 256, or of one whose numbers are no
    signed bytes."""
    if weight.codebook is not None:
        fits = all(-128 <= number <= 127 for number in weight.codebook)
        if weight.bits != 4 or not fits:
            return False
    return 0 < (weight.group or weight.columns) <= _MOST_INPUTS


def pack(
    kernels: Kernels,
    weight: QuantizedWeight,
    bias: Tensor | None,
    epilogue: int = binding.PLAIN,
    *,
    digits: int,
) -> PackedLinear:
    """Packs what `can_pack` says yes to, in panels of outputs.

    digits: of activations, 2 (14 bits) or 1 (8 bits). epilogue: as for `packed_linear.pack`.
    """
    panels = _CodePanels(kernels, weight, len(weight.codes), epilogue)
    panels.fill(0, weight)
    return panels.packed(bias, digits)


def pack_parts(
    kernels: Kernels,
    read: Callable[[Numbers], QuantizedWeight],
    outputs: int,
    inputs: int,
    bias: Tensor | None,
    epilogue: int = binding.PLAIN,
    *,
    digits: int,
) -> PackedLinear | None:
    """`pack` of a weight [outputs, inputs] of which no more than a few panels are there at a time; read: gives some of
    its outputs, quantized in the same way each time. None for what `can_pack` says no to, after the first time."""
    panels: _CodePanels | None = None
    for first, rows in panel_parts(kernels, outputs, inputs, epilogue):
        part = read(rows)
        if panels is None:
            if not can_pack(part):
                return None
            panels = _CodePanels(kernels, part, outputs, epilogue)
        panels.fill(first, part)
    return None if panels is None else panels.packed(bias, digits)


class _CodePanels:
    """Memory for the panels of a weight with so many outputs, and what lies beside them."""

    def __init__(
        self, kernels: Kernels, like: QuantizedWeight, outputs: int, epilogue: int
    ) -> None:
        """like: the weight, or some outputs of it."""
        self._kernels, self._like, self._epilogue = kernels, like, epilogue
        self._halves = 2 if epilogue == binding.SWIGLU else 1
        self._outputs = outputs // self._halves
        unit = 4 if like.bits == 8 else 8  # inputs of 32 bits
        self._group = like.group or like.columns
        whole, rest = divmod(like.columns, self._group)
        units = whole * -(-self._group // unit) + -(-rest // unit)
        count = count_panels(kernels, self._outputs, epilogue)
        shape = (count, units, kernels.panel)
        self._memory = zeros_in_huge_pages(shape, torch.int32, touch=False)
        # Of each part, in the order of panels.
        self._scales: list[Tensor] = []
        self._minima: list[Tensor] = []
        self._zeros: list[Tensor] = []

    def fill(self, first: int, part: QuantizedWeight) -> None:
        """Panels from number `first` on, with as many outputs as they have, after all that go before them."""
        outputs, codes = len(part.codes) // self._halves, part.codes.contiguous()
        self._kernels.pack_codes(
            codes.data_ptr(),
            outputs,
            part.columns,
            part.bits,
            self._group,
            self._epilogue,
            self._memory[first:].data_ptr(),
        )
        scales, minima = part.scales, part.minima
        if not all(
            bool(values.isfinite().all()) for values in (scales, minima) if values is not None
        ):
            scales = scales.float()  # the kernels read 16 bits as numbers
        for kept, values in (
            (self._scales, scales),
            (self._minima, minima),
            (self._zeros, part.zeros),
        ):
            if values is not None:
                kept.append(arrange(self._kernels, values, self._epilogue, outputs))

    def packed(self, bias: Tensor | None, digits: int) -> PackedLinear:
        """The layer, once all panels are filled."""
        like = self._like
        scales = torch.cat(self._scales)  # of several types the wider one
        minima = torch.cat(self._minima).to(scales.dtype) if self._minima else None
        zeros = torch.cat(self._zeros) if self._zeros else None
        order = None if like.order is None else like.order.int().contiguous()
        layout, zero = _BYTES if like.bits == 8 else _NIBBLES, 2 ** (like.bits - 1)
        if minima is not None:
            zero = 0
        table = (ctypes.c_uint8 * 16)()
        if like.codebook is not None:
            layout, zero = _TABLE, _ZERO_BYTE
            table[:] = [number + _ZERO_BYTE for number in like.codebook]
        kept = (scales, minima, zeros, order)
        meaning = binding.Quantized(
            *(None if values is None else values.data_ptr() for values in kept),
            self._group,
            layout,
            _SCALE_TYPES[scales.dtype],
            digits,
            zero,
            table,
        )
        packed = make_packed(
            self._kernels,
            self._memory,
            bias,
            like.columns,
            self._outputs,
            self._epilogue,
            meaning,
        )
        return packed.keeping(*kept, meaning)
