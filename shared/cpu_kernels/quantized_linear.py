"""Linear layers over codes that were packed once (`quantized_linear.h`)."""

import ctypes
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from shared.cpu_kernels import binding
from shared.cpu_kernels.binding import Kernels
from shared.cpu_kernels.host_memory import lasting_zeros
from shared.cpu_kernels.packed_linear import (
    PackedLinear,
    arrange,
    count_panels,
    make_packed,
    panel_parts,
)
from shared.weights.quantized_weight import Numbers, QuantizedWeight

_BYTES, _NIBBLES, _TABLE, _FIVES, _SIXES = range(5)
_BITS = {_BYTES: 8, _NIBBLES: 4, _TABLE: 4, _FIVES: 5, _SIXES: 6}
# Inputs and bytes of a unit of each.
_UNITS = {_BYTES: (4, 4), _NIBBLES: (8, 4), _TABLE: (8, 4), _FIVES: (32, 20), _SIXES: (16, 12)}
_SCALE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ZERO_BYTE = 128  # entries of a table are kept as so much more than they are
_BESIDE = (
    "scales",
    "minima",
    "factors",
    "minimum_factors",
    "zeros",
)  # fields of both, in the order of the kernels'
_MOST_RUN_SHIFT = 4  # groups of a block of K-quants: 16 or 8
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
        self._group = like.group or like.columns
        self._layout = _layout(like, self._group)
        self._least = like.span[0] if self._layout in (_FIVES, _SIXES) else 0
        unit, size = _UNITS[self._layout]
        whole, rest = divmod(like.columns, self._group)
        units = whole * -(-self._group // unit) + -(-rest // unit)
        count = count_panels(kernels, self._outputs, epilogue)
        shape = (count, units * size // 4, kernels.panel)
        self._memory = lasting_zeros(shape, torch.int32)
        # Of each part, in the order of panels.
        self._beside: dict[str, list[Tensor]] = {name: [] for name in _BESIDE}

    def fill(self, first: int, part: QuantizedWeight) -> None:
        """Panels from number `first` on, with as many outputs as they have, after all that go before them."""
        outputs, codes = len(part.codes) // self._halves, part.codes.contiguous()
        if self._least:
            codes = codes - self._least
        self._kernels.pack_codes(
            codes.data_ptr(),
            outputs,
            part.columns,
            _BITS[self._layout],
            self._group,
            self._epilogue,
            self._memory[first:].data_ptr(),
        )
        if not all(
            bool(values.isfinite().all())
            for values in (part.scales, part.minima)
            if values is not None
        ):
            part = replace(part, scales=part.scales.float())  # the kernels read 16 bits as numbers
        for name, kept in self._beside.items():
            if (values := getattr(part, name)) is not None:
                kept.append(arrange(self._kernels, values, self._epilogue, outputs))

    def packed(self, bias: Tensor | None, digits: int) -> PackedLinear:
        """The layer, once all panels are filled."""
        like = self._like
        # Of several types the wider one.
        found = {name: torch.cat(kept) if kept else None for name, kept in self._beside.items()}
        assert found["scales"] is not None
        dtype, run_shift = found["scales"].dtype, 0
        levels = {
            name: values.to(dtype)
            for name in ("scales", "minima")
            if (values := found[name]) is not None
        }
        if found["factors"] is not None:
            run_shift = min(map(_run_shift, levels.values()))
        found |= {name: values[:, :: 2**run_shift].contiguous() for name, values in levels.items()}
        order = None if like.order is None else like.order.int().contiguous()
        zero = 0 if like.minima is not None else 2 ** (like.bits - 1)
        table = (ctypes.c_uint8 * 16)()
        if like.codebook is not None:
            zero = _ZERO_BYTE
            table[:] = [number + _ZERO_BYTE for number in like.codebook]
        kept = (*found.values(), order)
        meaning = binding.Quantized(
            *(None if values is None else values.data_ptr() for values in kept),
            self._group,
            self._layout,
            _SCALE_TYPES[dtype],
            digits,
            zero - self._least,
            run_shift,
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


def _layout(weight: QuantizedWeight, group: int) -> int:
    """Codes of five or six bits are packed as such where groups are whole units of them."""
    if weight.bits == 4:
        return _NIBBLES if weight.codebook is None else _TABLE
    least, most = weight.span
    if weight.zeros is None:
        for layout in (_FIVES, _SIXES):
            if most - least < 2 ** _BITS[layout] and group % _UNITS[layout][0] == 0:
                return layout
    return _BYTES


def _run_shift(values: Tensor) -> int:
    """Of [panels, groups, columns] how many groups in a row, as a power of two, have equal numbers everywhere."""
    for shift in range(_MOST_RUN_SHIFT, 0, -1):
        first = values[:, :: 2**shift].repeat_interleave(2**shift, 1)[:, : values.shape[1]]
        if torch.equal(first, values):
            return shift
    return 0
