"""GPTQ as AutoGPTQ ("gptq") and GPTQModel ("gptq_v2") store it: words along inputs."""

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
    whole_order,
)


class Gptq(Layout):
    """`qweight` [inputs / per word, out], `qzeros` [groups, out / per word], `scales` [groups, out], and `g_idx`
    [inputs], the group of each. Zero points of "gptq" are stored less one."""

    main = "qweight"
    tensors = ("qweight", "qzeros", "scales", "g_idx")

    def sizes(self, main: Shape) -> tuple[int, int]:
        """See `Layout.sizes`."""
        return main[1], main[0] * self.per_word

    def required(self, out: int, inputs: int) -> dict[str, Stored]:
        """See `Layout.required`."""
        each = self.per_word
        if out % each or inputs % each:
            raise BadCodes("qweight", f"{out} outputs or {inputs} inputs are no multiple of {each}")
        groups = self.groups(inputs)
        found = {
            "qweight": Stored(WORDS, (inputs // each, out)),
            "qzeros": Stored(WORDS, (groups, out // each)),
            "scales": Stored(SCALES, (groups, out)),
        }
        return found | (self._index(inputs) if self.codes.ordered else {})

    def optional(self, out: int, inputs: int) -> dict[str, Stored]:
        """See `Layout.optional`."""
        return self._index(inputs)

    @staticmethod
    def _index(inputs: int) -> dict[str, Stored]:
        return {"g_idx": Stored(("I32", "I64"), (inputs,))}

    def read(self, tensors: Tensors, inputs: int, rows: slice) -> QuantizedWeight:
        """See `Layout.read`."""
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
        stored = self.packed_outputs(tensors, "qzeros", rows)
        zeros = stored.to(torch.int16) + self.codes.zero_shift
        if self.codes.symmetric:
            if bool((zeros != 2 ** (self.codes.bits - 1)).any()):
                raise BadCodes("qzeros", "a zero point is not in the middle, and sym is true")
            return None
        if bool((zeros > 255).any()):
            raise BadCodes("qzeros", "a zero point is 256")
        return zeros.to(torch.uint8).T.contiguous()
