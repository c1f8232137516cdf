"""The codes of AWQ."""

import torch
from torch import Tensor

from shared.weights.layouts.awq import WORD, AwqLayout
from shared.weights.quantized_weight import QuantizedWeight
from shared.weights.readers.layout import ALL, Tensors, apart, as_bytes, together

# Of output number j of eight the place in the word, from the lowest bits on: stored are 0, 2, 4, 6, 1, 3, 5, 7.
_PLACES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])


class Awq(AwqLayout):
    """See `Reader`."""

    def read(self, tensors: Tensors, inputs: int, rows: slice) -> QuantizedWeight:
        """See `Reader.read`."""
        scales = tensors.part("scales", ALL, rows).T.contiguous()
        codes, zeros = (self._codes(tensors, name, rows) for name in ("qweight", "qzeros"))
        group = self.codes.group
        return QuantizedWeight(together(codes, 4), scales, 4, group, zeros.contiguous())

    @staticmethod
    def _codes(tensors: Tensors, name: str, rows: slice) -> Tensor:
        """uint8 [outputs, n] of words [n, out / 8]."""
        first = rows.start // WORD
        words = tensors.part(name, ALL, slice(first, -(-rows.stop // WORD)))
        stored = apart(as_bytes(words), 4).unflatten(1, (-1, WORD))
        found = stored[..., _PLACES].flatten(1)
        codes: Tensor = found[:, rows.start - first * WORD : rows.stop - first * WORD].T
        return codes
