"""The codes of GPTQ."""

import torch
from torch import Tensor

from shared.weights.layouts.gptq import GptqLayout
from shared.weights.layouts.layout import BadCodes
from shared.weights.quantized_weight import QuantizedWeight
from shared.weights.readers.layout import (
    ALL,
    Tensors,
    apart,
    as_bytes,
    packed_outputs,
    together,
    whole_order,
)


class Gptq(GptqLayout):
    """See `Reader`."""

    def read(self, tensors: Tensors, inputs: int, rows: slice) -> QuantizedWeight:
        """See `Reader.read`."""
        bits, group = self.codes.bits, self.codes.group
        scales = tensors.part("scales", ALL, rows).T.contiguous()
        codes = as_bytes(tensors.part("qweight", ALL, rows).T)
        zeros = self._zeros(tensors, rows)
        order = None
        if tensors.has("g_idx"):
            order = whole_order("g_idx", tensors.whole("g_idx"), group, scales.shape[1])
        if order is not None:
            codes = together(apart(codes, bits)[:, order], bits)
        return QuantizedWeight(codes, scales, bits, group, zeros, order=order)

    def _zeros(self, tensors: Tensors, rows: slice) -> Tensor | None:
        """uint8 [outputs, groups]; none where they are all in the middle, as the configuration says then."""
        stored = packed_outputs(self, tensors, "qzeros", rows)
        zeros = stored.to(torch.int16) + self.codes.zero_shift
        if self.codes.symmetric:
            if bool((zeros != 2 ** (self.codes.bits - 1)).any()):
                raise BadCodes("qzeros", "a zero point is not in the middle, and sym is true")
            return None
        if bool((zeros > 255).any()):
            raise BadCodes("qzeros", "a zero point is 256")
        return zeros.to(torch.uint8).T.contiguous()
