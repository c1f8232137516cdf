"""AWQ as AutoAWQ's "gemm" stores it: words along outputs, eight codes in an order of their own."""

import torch
from torch import Tensor

from shared.weights.quantized_weight import QuantizedWeight
from shared.weights.readers.layout import (
    ALL,
    SCALES,
    WORDS,
    BadCodes,
    Layout,
    Shape,
    Stored,
    Tensors,
    apart,
    as_bytes,
    together,
)

_WORD = 8  # codes of one
# Of output number j of eight the place in the word, from the lowest bits on: stored are 0, 2, 4, 6, 1, 3, 5, 7.
_PLACES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])


class Awq(Layout):
    """`qweight` [inputs, out / 8], `qzeros` [groups, out / 8], `scales` [groups, out]."""

    main = "qweight"
    tensors = ("qweight", "qzeros", "scales")

    def sizes(self, main: Shape) -> tuple[int, int]:
        """See `Layout.sizes`."""
        return main[1] * _WORD, main[0]

    def required(self, out: int, inputs: int) -> dict[str, Stored]:
        """See `Layout.required`."""
        if out % _WORD or inputs % 2:
            raise BadCodes("qweight", f"{out} outputs are no multiple of 8, or {inputs} inputs odd")
        groups = self.groups(inputs)
        return {
            "qweight": Stored(WORDS, (inputs, out // _WORD)),
            "qzeros": Stored(WORDS, (groups, out // _WORD)),
            "scales": Stored(SCALES, (groups, out)),
        }

    def read(self, tensors: Tensors, inputs: int, rows: slice) -> QuantizedWeight:
        """See `Layout.read`."""
        scales = tensors.part("scales", ALL, rows).T.contiguous()
        codes, zeros = (self._codes(tensors, name, rows) for name in ("qweight", "qzeros"))
        group = self.codes.group
        return QuantizedWeight(together(codes, 4), scales, 4, group, zeros.contiguous())

    @staticmethod
    def _codes(tensors: Tensors, name: str, rows: slice) -> Tensor:
        """uint8 [outputs, n] of words [n, out / 8]."""
        first = rows.start // _WORD
        words = tensors.part(name, ALL, slice(first, -(-rows.stop // _WORD)))
        stored = apart(as_bytes(words), 4).unflatten(1, (-1, _WORD))
        found = stored[..., _PLACES].flatten(1)
        codes: Tensor = found[:, rows.start - first * _WORD : rows.stop - first * _WORD].T
        return codes
