"""Linear layers over codes that were packed once (`quantized_linear.h`)."""

import ctypes

import torch
from torch import Tensor

from shared.cpu_kernels import binding
from shared.cpu_kernels.binding import Kernels
from shared.cpu_kernels.host_memory import zeros_in_huge_pages
from shared.cpu_kernels.packed_linear import PackedLinear, arrange, count_panels, make_packed
from shared.weights.quantized_weight import QuantizedWeight

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
    return 0 < (weight.group or weight.inputs) <= _MOST_INPUTS


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
    outputs = len(weight.codes) // (2 if epilogue == binding.SWIGLU else 1)
    panels = count_panels(kernels, outputs, epilogue)
    unit = 4 if weight.bits == 8 else 8  # inputs of 32 bits
    group = weight.group or weight.inputs
    whole, rest = divmod(weight.inputs, group)
    units = whole * -(-group // unit) + -(-rest // unit)
    memory = zeros_in_huge_pages((panels, units, kernels.panel), torch.int32, touch=False)
    codes = weight.codes.contiguous()
    kernels.pack_codes(
        codes.data_ptr(),
        outputs,
        weight.inputs,
        weight.bits,
        group,
        epilogue,
        memory.data_ptr(),
    )

    def arranged(values: Tensor | None) -> Tensor | None:
        return None if values is None else arrange(kernels, values, epilogue, outputs)

    scales, minima = weight.scales, weight.minima
    if not all(bool(part.isfinite().all()) for part in (scales, minima) if part is not None):
        scales = scales.float()  # the kernels read 16 bits as numbers
    minima = None if minima is None else minima.to(scales.dtype)
    order = None if weight.order is None else weight.order.int().contiguous()
    kept = tuple(arranged(values) for values in (scales, minima, weight.zeros))
    layout, zero = _BYTES if weight.bits == 8 else _NIBBLES, 2 ** (weight.bits - 1)
    if minima is not None:
        zero = 0
    table = (ctypes.c_uint8 * 16)()
    if weight.codebook is not None:
        layout, zero = _TABLE, _ZERO_BYTE
        table[:] = [number + _ZERO_BYTE for number in weight.codebook]
    meaning = binding.Quantized(
        *(None if values is None else values.data_ptr() for values in (*kept, order)),
        group,
        layout,
        _SCALE_TYPES[scales.dtype],
        digits,
        zero,
        table,
    )
    packed = make_packed(kernels, memory, bias, weight.inputs, outputs, epilogue, meaning)
    return packed.keeping(*kept, order, meaning)
