"""compressed-tensors: codes of 4 or 8 bits in words along inputs ("pack-quantized"), or of 8 bits ("int-quantized")."""

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

_OF_ACTIVATIONS = ("input_scale", "input_zero_point", "output_scale", "output_zero_point")


class _Compressed(Layout):
    unused = _OF_ACTIVATIONS

    def _scale(self, out: int, inputs: int) -> dict[str, Stored]:
        shape = (1,) if self.codes.one_scale else (out, self.groups(inputs))
        return {"weight_scale": Stored(SCALES, shape)}

    def _scales(self, tensors: Tensors, rows: slice) -> Tensor:
        """[outputs, groups]."""
        if self.codes.one_scale:
            return tensors.whole("weight_scale").expand(rows.stop - rows.start, 1).contiguous()
        return tensors.part("weight_scale", rows, ALL).contiguous()


class PackQuantized(_Compressed):
    """`weight_packed` [out, inputs / per word], `weight_scale` [out, groups], with zero points `weight_zero_point`
    [out / per word, groups], with an order `weight_g_idx` [inputs]; `weight_shape` is [out, inputs]."""

    main = "weight_packed"
    tensors = (
        "weight_packed",
        "weight_scale",
        "weight_zero_point",
        "weight_g_idx",
        "weight_shape",
    )

    def sizes(self, main: Shape) -> tuple[int, int]:
        """See `Layout.sizes`."""
        return main[0], main[1] * self.per_word

    def required(self, out: int, inputs: int) -> dict[str, Stored]:
        """See `Layout.required`."""
        if inputs % 2:
            raise BadCodes("weight_packed", f"{inputs} inputs are odd")
        found = {"weight_packed": Stored(WORDS, (out, -(-inputs // self.per_word)))}
        found |= self._scale(out, inputs)
        if not self.codes.symmetric:
            found |= self._zero_points(out, inputs)
        return found | (self._index(inputs) if self.codes.ordered else {})

    def _zero_points(self, out: int, inputs: int) -> dict[str, Stored]:
        shape = (-(-out // self.per_word), self.groups(inputs))
        return {"weight_zero_point": Stored(WORDS, shape)}

    def optional(self, out: int, inputs: int) -> dict[str, Stored]:
        """See `Layout.optional`."""
        shape = {"weight_shape": Stored(("I32", "I64"), (2,))}
        return shape | self._index(inputs) | self._zero_points(out, inputs)

    @staticmethod
    def _index(inputs: int) -> dict[str, Stored]:
        return {"weight_g_idx": Stored(("I32", "I64"), (inputs,))}

    def read(self, tensors: Tensors, inputs: int, rows: slice) -> QuantizedWeight:
        """See `Layout.read`."""
        bits, group = self.codes.bits, self.codes.group
        if tensors.has("weight_shape") and int(tensors.whole("weight_shape")[1]) != inputs:
            raise BadCodes("weight_shape", f"config.json says {inputs} inputs")
        scales = self._scales(tensors, rows)
        codes = as_bytes(tensors.part("weight_packed", rows, ALL))[:, : inputs * bits // 8]
        order = None
        if tensors.has("weight_g_idx"):
            stored = tensors.whole("weight_g_idx")
            order = whole_order("weight_g_idx", stored, group, scales.shape[1])
        if order is not None:
            codes = together(apart(codes, bits)[:, order], bits)
        zeros = self._zeros(tensors, rows) if tensors.has("weight_zero_point") else None
        return QuantizedWeight(codes, scales, bits, group, zeros, order=order)

    def _zeros(self, tensors: Tensors, rows: slice) -> Tensor | None:
        each = self.per_word
        first = rows.start // each
        words = tensors.part("weight_zero_point", slice(first, -(-rows.stop // each)), ALL)
        zeros = apart(as_bytes(words.T), self.codes.bits).T
        zeros = zeros[rows.start - first * each : rows.stop - first * each]
        if not self.codes.symmetric:
            return zeros.contiguous()
        if bool((zeros != 2 ** (self.codes.bits - 1)).any()):
            raise BadCodes("weight_zero_point", "it is not zero, and symmetric is true")
        return None


class IntQuantized(_Compressed):
    """`weight` int8 [out, inputs], `weight_scale` [out, groups] or [1], and `weight_zero_point` int8 alike."""

    main = "weight"
    tensors = ("weight", "weight_scale", "weight_zero_point")
    main_dtypes = ("I8",)

    def sizes(self, main: Shape) -> tuple[int, int]:
        """See `Layout.sizes`."""
        return main[0], main[1]

    def required(self, out: int, inputs: int) -> dict[str, Stored]:
        """See `Layout.required`."""
        found = {"weight": Stored(("I8",), (out, inputs))} | self._scale(out, inputs)
        if not self.codes.symmetric:
            shape = found["weight_scale"].shape
            found["weight_zero_point"] = Stored(("I8",), shape)
        return found

    def optional(self, out: int, inputs: int) -> dict[str, Stored]:
        """See `Layout.optional`: zero points that are zero."""
        shape = self._scale(out, inputs)["weight_scale"].shape
        return {"weight_zero_point": Stored(("I8",), shape)}

    def read(self, tensors: Tensors, inputs: int, rows: slice) -> QuantizedWeight:
        """See `Layout.read`."""
        scales = self._scales(tensors, rows)
        codes = _unsigned(tensors.part("weight", rows, ALL))
        zeros = None
        if tensors.has("weight_zero_point"):
            zeros = self._zeros(tensors, rows)
        return QuantizedWeight(codes, scales, 8, self.codes.group, zeros)

    def _zeros(self, tensors: Tensors, rows: slice) -> Tensor | None:
        if self.codes.one_scale:
            stored = tensors.whole("weight_zero_point").expand(rows.stop - rows.start, 1)
        else:
            stored = tensors.part("weight_zero_point", rows, ALL)
        if self.codes.symmetric:
            if bool((stored != 0).any()):
                raise BadCodes("weight_zero_point", "it is not zero, and symmetric is true")
            return None
        return _unsigned(stored)


def _unsigned(values: Tensor) -> Tensor:
    """uint8 of int8, each 128 more."""
    return values.contiguous().view(torch.uint8) ^ 128
