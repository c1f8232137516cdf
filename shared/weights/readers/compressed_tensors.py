"""The codes of compressed-tensors."""

import torch
from torch import Tensor

from shared.model_config.quantization import MXFP4
from shared.weights.layouts.compressed_tensors import (
    BytesLayout,
    CompressedLayout,
    Float4Layout,
    ModeloptFloat4Layout,
    PackedLayout,
)
from shared.weights.layouts.layout import NOT_FINITE, BadCodes
from shared.weights.quantized_weight import QuantizedWeight
from shared.weights.readers.layout import (
    ALL,
    FLOAT4,
    Tensors,
    apart,
    as_bytes,
    together,
    unsigned,
    whole_order,
)

_NO_NUMBER = 255  # among exponents


class PackQuantized(PackedLayout):
    """See `Reader`."""

    def read(self, tensors: Tensors, inputs: int, rows: slice) -> QuantizedWeight:
        """See `Reader.read`."""
        bits, group = self.codes.bits, self.codes.group
        if tensors.has("weight_shape") and int(tensors.whole("weight_shape")[1]) != inputs:
            raise BadCodes("weight_shape", f"config.json says {inputs} inputs")
        scales = _scales(self, tensors, rows)
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


class Float4(Float4Layout):
    """See `Reader`. Codes are places in a table of twice their numbers, which is exact."""

    def read(self, tensors: Tensors, inputs: int, rows: slice) -> QuantizedWeight:
        """See `Reader.read`."""
        codes = tensors.part("weight_packed", rows, ALL).contiguous()
        stored = tensors.part("weight_scale", rows, ALL)
        if self.codes.layout == MXFP4:
            if bool((stored == _NO_NUMBER).any()):
                raise BadCodes("weight_scale", NOT_FINITE)
            scales = torch.ldexp(torch.ones(stored.shape), stored.int() - 128).bfloat16()
        else:
            scales = stored.float() / tensors.whole("weight_global_scale").reshape(1, 1) * 0.5
        return QuantizedWeight(codes, scales, 4, self.codes.group, codebook=FLOAT4)


class ModeloptFloat4(ModeloptFloat4Layout):
    """See `Reader`, and `Float4`."""

    def read(self, tensors: Tensors, inputs: int, rows: slice) -> QuantizedWeight:
        """See `Reader.read`."""
        codes = tensors.part("weight", rows, ALL).contiguous()
        stored = tensors.part("weight_scale", rows, ALL).float()
        scales = stored * tensors.whole("weight_scale_2").reshape(1, 1) * 0.5
        return QuantizedWeight(codes, scales, 4, self.codes.group, codebook=FLOAT4)


class IntQuantized(BytesLayout):
    """See `Reader`."""

    def read(self, tensors: Tensors, inputs: int, rows: slice) -> QuantizedWeight:
        """See `Reader.read`."""
        bits, scales = self.codes.bits, _scales(self, tensors, rows)
        codes = together(self._unsigned("weight", tensors.part("weight", rows, ALL)), bits)
        zeros = None
        if tensors.has("weight_zero_point"):
            zeros = self._zeros(tensors, rows)
        activations = self.codes.activations
        return QuantizedWeight(
            codes, scales, bits, self.codes.group, zeros, activations=activations
        )

    def _unsigned(self, name: str, values: Tensor) -> Tensor:
        """uint8 of int8, each half of all codes more."""
        if self.codes.bits == 8:
            return unsigned(values)
        if bool(((values < -8) | (values > 7)).any()):
            raise BadCodes(name, "it has an element beyond -8 to 7, and num_bits is 4")
        return (values + 8).to(torch.uint8)

    def _zeros(self, tensors: Tensors, rows: slice) -> Tensor | None:
        if self.codes.one_scale:
            stored = tensors.whole("weight_zero_point").expand(rows.stop - rows.start, 1)
        else:
            stored = tensors.part("weight_zero_point", rows, ALL)
        if self.codes.symmetric:
            if bool((stored != 0).any()):
                raise BadCodes("weight_zero_point", "it is not zero, and symmetric is true")
            return None
        return self._unsigned("weight_zero_point", stored)


def _scales(layout: CompressedLayout, tensors: Tensors, rows: slice) -> Tensor:
    """[outputs, groups]."""
    if layout.codes.one_scale:
        return tensors.whole("weight_scale").expand(rows.stop - rows.start, 1).contiguous()
    return tensors.part("weight_scale", rows, ALL).contiguous()
