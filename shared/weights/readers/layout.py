"""What the readers of all layouts are, and how words of 32 bits hold codes."""

from typing import Protocol

import torch
from torch import Tensor

from shared.weights.layouts.layout import BadCodes, Layout
from shared.weights.quantized_weight import QuantizedWeight

ALL = slice(None)
# Twice what numbers of 4 bits (e2m1) are, by their codes.
FLOAT4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


class Tensors(Protocol):
    """Those of one layer, by the last parts of their names: mapped, not to be written to."""

    def name(self, tensor: str) -> str:
        """In the checkpoint."""

    def has(self, tensor: str) -> bool:
        """Whether it is stored."""

    def whole(self, tensor: str) -> Tensor:
        """All of it."""

    def part(self, tensor: str, rows: slice, columns: slice) -> Tensor:
        """Some rows and columns of a matrix; nothing else is read."""


class Reader(Protocol):
    """Of the layers of one layout, as codes."""

    def read(self, tensors: Tensors, inputs: int, rows: slice) -> QuantizedWeight:
        """Outputs `rows`, which has a begin and an end. Raises BadCodes."""


def packed_outputs(layout: Layout, tensors: Tensors, name: str, rows: slice) -> Tensor:
    """uint8 [n, outputs]: one code a byte, of a tensor of words [n, out / `per_word`], the first in the lowest bits."""
    each = layout.per_word
    first = rows.start // each
    words = tensors.part(name, ALL, slice(first, -(-rows.stop // each)))
    codes = apart(as_bytes(words), layout.codes.bits)
    return codes[:, rows.start - first * each : rows.stop - first * each]


def as_bytes(words: Tensor) -> Tensor:
    """uint8 [n, 4 * m] of int32 [n, m], the lowest byte of each first."""
    return words.contiguous().view(torch.uint8)


def unsigned(values: Tensor) -> Tensor:
    """uint8 of int8, each 128 more."""
    return values.contiguous().view(torch.uint8) ^ 128


def apart(codes: Tensor, bits: int) -> Tensor:
    """One code a byte, of bytes whose lower half comes first."""
    return codes if bits == 8 else torch.stack((codes & 15, codes >> 4), -1).flatten(1)


def together(codes: Tensor, bits: int) -> Tensor:
    """The reverse of `apart`."""
    return codes.contiguous() if bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4


def whole_order(tensor: str, of_inputs: Tensor, group: int, count: int) -> Tensor | None:
    """int64 [inputs]: the inputs by the groups that they belong to; None where they lie so. Raises BadCodes unless each
    of the `count` groups has its `group` of inputs."""
    inputs = len(of_inputs)
    found = of_inputs.long()
    expected = torch.arange(inputs) // (group or max(1, inputs))
    if torch.equal(found, expected):
        return None
    order = torch.argsort(found, stable=True)
    if not torch.equal(found[order], expected):
        raise BadCodes(tensor, f"its {count} groups have not {group or inputs} inputs each")
    return order
