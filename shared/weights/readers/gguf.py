"""Blocks of GGUF files as codes: what a block's bytes say, as `gguf.quants` of the library `gguf` has it.

All of these are exact: `QuantizedWeight.dequantize` gives what `gguf.dequantize` gives, bit for bit, but for the sign
of zeros. The scale of a group of K-quants is a product of a number of 16 bits, the same for a whole block, and a factor
of 4 to 8, which float32 holds; their minima alike. Codes of 5 and 6 bits take a byte each here; kernels know by their
span that they need less. Types that have no such form are numbers by the library.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from shared.checkpoint.gguf.block_types import CODED
from shared.weights.quantized_weight import QuantizedWeight
from shared.weights.readers.layout import FLOAT4

_Read = Callable[[Tensor], QuantizedWeight]
# What codes of IQ4_NL and IQ4_XS stand for.
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def read_blocks(kind: str, rows: Tensor) -> QuantizedWeight:
    """The codes of uint8 [out, bytes of a row] of a type that `is_exact`."""
    return _READ[kind](rows.unflatten(1, (-1, CODED[kind].nbytes)))


def read_numbers(kind: str, rows: Tensor) -> Tensor:
    """float32 [out, inputs] of the same, whatever the type."""
    # For few types alone; importing it takes a moment.
    from gguf import GGMLQuantizationType, dequantize

    numbers = dequantize(rows.contiguous().numpy(), GGMLQuantizationType[kind])
    return torch.from_numpy(np.asarray(numbers))


def is_exact(kind: str) -> bool:
    """Whether `read_blocks` reads a type of codes: it keeps their numbers as they are."""
    return kind in _READ


def _q8_0(blocks: Tensor) -> QuantizedWeight:
    return _bytes(blocks[..., 2:] ^ 128, _halves(blocks, 0), 32)


def _q4_0(blocks: Tensor) -> QuantizedWeight:
    return _nibbles(_low_then_high(blocks[..., 2:]), _halves(blocks, 0), 32)


def _q4_1(blocks: Tensor) -> QuantizedWeight:
    codes = _low_then_high(blocks[..., 4:])
    return _nibbles(codes, _halves(blocks, 0), 32, minima=_halves(blocks, 2))


def _q5_0(blocks: Tensor) -> QuantizedWeight:
    codes = _low_then_high(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return _bytes(codes + 112, _halves(blocks, 0), 32, bits=5)


def _q5_1(blocks: Tensor) -> QuantizedWeight:
    codes = _low_then_high(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return _bytes(codes, _halves(blocks, 0), 32, bits=5, minima=_halves(blocks, 2))


def _q2_k(blocks: Tensor) -> QuantizedWeight:
    both, codes = blocks[..., :16], _shifted(blocks[..., 16:80].unflatten(-1, (2, 32)), 2)
    found = _nibbles(
        codes.flatten(-3), _halves(blocks, 80, 16), 16, minima=-_halves(blocks, 82, 16)
    )
    return _times(found, both & 15, both >> 4)


def _q3_k(blocks: Tensor) -> QuantizedWeight:
    low = _shifted(blocks[..., 32:96].unflatten(-1, (2, 32)), 2).flatten(-3)
    high = _bits(blocks[..., :32]).flatten(-2)
    packed = blocks[..., 96:108]
    fours = torch.cat((packed[..., :8] & 15, packed[..., :8] >> 4), -1)
    twos = torch.cat([packed[..., 8:] >> shift & 3 for shift in (0, 2, 4, 6)], -1)
    # The number is low + 4 high - 4, and 8 is the code of zero.
    found = _nibbles((low | high << 2) + 4, _halves(blocks, 108, 16), 16)
    return _times(found, (fours | twos << 4) - 32)


def _q4_k(blocks: Tensor) -> QuantizedWeight:
    codes = _shifted(blocks[..., 16:144].unflatten(-1, (4, 32)), 4).flatten(-3)
    found = _nibbles(codes, _halves(blocks, 0, 8), 32, minima=-_halves(blocks, 2, 8))
    return _times(found, *_of_six_bits(blocks))


def _q5_k(blocks: Tensor) -> QuantizedWeight:
    low = _shifted(blocks[..., 48:176].unflatten(-1, (4, 32)), 4).flatten(-3)
    high = _bits(blocks[..., 16:48]).flatten(-2)
    scales, minima = _halves(blocks, 0, 8), -_halves(blocks, 2, 8)
    found = _bytes(low | high << 4, scales, 32, bits=5, minima=minima)
    return _times(found, *_of_six_bits(blocks))


def _q6_k(blocks: Tensor) -> QuantizedWeight:
    low = _shifted(blocks[..., :128].unflatten(-1, (2, 64)), 4).flatten(-3)
    high = _shifted(blocks[..., 128:192].unflatten(-1, (2, 32)), 2).flatten(-3)
    found = _bytes((low | high << 4) + 96, _halves(blocks, 208, 16), 16, bits=6)
    return _times(found, blocks[..., 192:208])


def _iq4_nl(blocks: Tensor) -> QuantizedWeight:
    codes = _low_then_high(blocks[..., 2:])
    return _nibbles(codes, _halves(blocks, 0), 32, codebook=_IQ4)


def _iq4_xs(blocks: Tensor) -> QuantizedWeight:
    fours = _shifted(blocks[..., 4:8].unflatten(-1, (4, 1)), 4).flatten(-3)
    twos = _shifted(blocks[..., 2:4].unflatten(-1, (2, 1)), 2).flatten(-3)
    codes = _low_then_high(blocks[..., 8:].unflatten(-1, (8, 16))).flatten(-2)
    found = _nibbles(codes, _halves(blocks, 0, 8), 32, codebook=_IQ4)
    return _times(found, (fours | twos << 4) - 32)


def _mxfp4(blocks: Tensor) -> QuantizedWeight:
    codes = _low_then_high(blocks[..., 1:])
    # Half a power of two of its exponent, as the table has twice the numbers.
    exponents = blocks[..., :1].int() - 128
    scales = torch.ldexp(torch.ones(exponents.shape), exponents).bfloat16()
    return _nibbles(codes, scales, 32, codebook=FLOAT4)


_READ: Mapping[str, _Read] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}


def _bytes(
    codes: Tensor, scales: Tensor, group: int, minima: Tensor | None = None, bits: int = 8
) -> QuantizedWeight:
    """Of codes [out, blocks, elements] and scales [out, blocks, groups of a block]; bits: that codes really have,
    around 128 or, with minima, from zero."""
    shift = None if minima is None else minima.flatten(1)
    least = 128 - 2 ** (bits - 1) if minima is None else 0
    span = least, least + 2**bits - 1
    return QuantizedWeight(codes.flatten(1), scales.flatten(1), 8, group, minima=shift, span=span)


def _nibbles(
    codes: Tensor,
    scales: Tensor,
    group: int,
    minima: Tensor | None = None,
    codebook: tuple[int, ...] | None = None,
) -> QuantizedWeight:
    codes = codes.flatten(1)
    together = codes[:, ::2] | codes[:, 1::2] << 4
    shift = None if minima is None else minima.flatten(1)
    return QuantizedWeight(together, scales.flatten(1), 4, group, minima=shift, codebook=codebook)


def _times(
    found: QuantizedWeight, factors: Tensor, minimum_factors: Tensor | None = None
) -> QuantizedWeight:
    """With factors [out, blocks, groups of a block], bytes of int8."""
    minima = None if minimum_factors is None else minimum_factors.flatten(1).view(torch.int8)
    scales = factors.flatten(1).view(torch.int8)
    return replace(found, factors=scales, minimum_factors=minima)


def _halves(blocks: Tensor, place: int, times: int = 1) -> Tensor:
    """float16 [out, blocks, times]: the same for so many groups of a block."""
    return blocks[..., place : place + 2].contiguous().view(torch.float16).expand(-1, -1, times)


def _low_then_high(codes: Tensor) -> Tensor:
    return torch.cat((codes & 15, codes >> 4), -1)


def _shifted(codes: Tensor, bits: int) -> Tensor:
    """[..., 8 / bits, n] of [..., n]: all lowest bits first, one number a byte."""
    parts = [codes >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
    return torch.stack(parts, -2)


def _bits(codes: Tensor) -> Tensor:
    return _shifted(codes, 1)


def _fifth_bits(words: Tensor) -> Tensor:
    """16 times bit number i of 32 for element i."""
    bits = words[..., None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten(-2) << 4


def _of_six_bits(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 [out, blocks, 8]: factors of scales and minima, of 12 bytes behind what each counts in."""
    first, second, third = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), -1)
    minima = torch.cat((second & 63, third >> 4 | second >> 6 << 4), -1)
    return scales, minima
