"""compressed-tensors: codes of 4 or 8 bits in words along inputs ("pack-quantized"), in bytes ("int-quantized"), and
numbers of 4 bits ("nvfp4-pack-quantized", "mxfp4-pack-quantized")."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from shared.model_config.quantization import MXFP4
from shared.weights.layouts.layout import INDEX, SCALES, WORDS, BadCodes, Layout, Shape, Stored

OF_CACHE = ("k_scale", "v_scale")
OF_ACTIVATIONS = ("input_scale", "input_zero_point", "output_scale", "output_zero_point")


class CompressedLayout(Layout):
    """What all have."""

    unused: ClassVar[tuple[str, ...]] = OF_ACTIVATIONS

    def scale(self, out: int, inputs: int) -> dict[str, Stored]:
        """`weight_scale`."""
        shape = (1,) if self.codes.one_scale else (out, self.groups(inputs))
        return {"weight_scale": Stored(SCALES, shape)}


class PackedLayout(CompressedLayout):
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
    order = "weight_g_idx"

    def of_shapes(self, shapes: Mapping[str, Shape], said: Sequence[int]) -> Layout:
        """See `Layout.of_shapes`."""
        found = [shapes.get(tensor, ()) for tensor in ("weight_packed", "weight_scale")]
        for tensor, shape in zip(("weight_packed", "weight_scale"), found, strict=True):
            if len(shape) != 2:
                raise BadCodes(tensor, "the checkpoint lacks it, or it is no matrix")
        if len(said) != 2:
            raise BadCodes("weight_shape", "the checkpoint lacks it, or it is not two numbers")
        (_, words), (_, groups) = found
        bits = next((bits for bits in (4, 8) if -(-said[1] * bits // 32) == words), 0)
        if not bits:
            raise BadCodes(
                "weight_packed", f"{words} words for {said[1]} inputs have not 4 or 8 bits each"
            )
        symmetric = "weight_zero_point" not in shapes
        return self.with_own(bits, said[1], groups, symmetric)

    def sizes(self, main: Shape) -> tuple[int, int]:
        """See `Layout.sizes`."""
        return main[0], main[1] * self.per_word

    def required(self, out: int, inputs: int) -> dict[str, Stored]:
        """See `Layout.required`."""
        if inputs % 2:
            raise BadCodes("weight_packed", f"{inputs} inputs are odd")
        found = {"weight_packed": Stored(WORDS, (out, -(-inputs // self.per_word)))}
        found |= self.scale(out, inputs)
        if not self.codes.symmetric:
            found |= self._zero_points(out, inputs)
        return found | (self._index(inputs) if self.codes.ordered else {})

    def _zero_points(self, out: int, inputs: int) -> dict[str, Stored]:
        shape = (-(-out // self.per_word), self.groups(inputs))
        return {"weight_zero_point": Stored(WORDS, shape)}

    def optional(self, out: int, inputs: int) -> dict[str, Stored]:
        """See `Layout.optional`."""
        shape = {"weight_shape": Stored(INDEX, (2,))}
        return shape | self._index(inputs) | self._zero_points(out, inputs)

    @staticmethod
    def _index(inputs: int) -> dict[str, Stored]:
        return {"weight_g_idx": Stored(INDEX, (inputs,))}


class Float4Layout(CompressedLayout):
    """Numbers of 4 bits (e2m1). `weight_packed` uint8 [out, inputs / 2], the even one of two inputs in the lower half
    of a byte; of "mxfp4" `weight_scale` uint8 [out, groups], exponents of two, 127 more than they are; of "nvfp4"
    `weight_scale` e4m3 [out, groups], and `weight_global_scale` float32 [1] by which these are divided."""

    main = "weight_packed"
    tensors = ("weight_packed", "weight_scale", "weight_global_scale")
    unused: ClassVar[tuple[str, ...]] = (*OF_ACTIVATIONS, "input_global_scale")
    main_dtypes = ("U8",)

    def sizes(self, main: Shape) -> tuple[int, int]:
        """See `Layout.sizes`."""
        return main[0], main[1] * 2

    def required(self, out: int, inputs: int) -> dict[str, Stored]:
        """See `Layout.required`."""
        if inputs % 2:
            raise BadCodes("weight_packed", f"{inputs} inputs are odd")
        shape = (out, self.groups(inputs))
        found = {"weight_packed": Stored(self.main_dtypes, (out, inputs // 2))}
        if self.codes.layout == MXFP4:
            return found | {"weight_scale": Stored(("U8",), shape)}
        scales = {"weight_scale": Stored(("F8_E4M3",), shape)}
        return found | scales | {"weight_global_scale": Stored(("F32",), (1,), ())}


class ModeloptFloat4Layout(Float4Layout):
    """ "nvfp4" as Model Optimizer has it: `weight` is what `weight_packed` is, and `weight_scale_2` float32 what scales
    are multiplied by."""

    main = "weight"
    tensors = ("weight", "weight_scale", "weight_scale_2")
    unused = (*OF_ACTIVATIONS, *OF_CACHE)

    def required(self, out: int, inputs: int) -> dict[str, Stored]:
        """See `Layout.required`."""
        if inputs % 2:
            raise BadCodes("weight", f"{inputs} inputs are odd")
        return {
            "weight": Stored(self.main_dtypes, (out, inputs // 2)),
            "weight_scale": Stored(("F8_E4M3",), (out, self.groups(inputs))),
            "weight_scale_2": Stored(("F32",), (), (1,)),
        }


class BytesLayout(CompressedLayout):
    """`weight` int8 [out, inputs], of codes of 4 bits one in a byte, `weight_scale` [out, groups] or [1], and
    `weight_zero_point` int8 alike."""

    main = "weight"
    tensors = ("weight", "weight_scale", "weight_zero_point")
    main_dtypes = ("I8",)

    def sizes(self, main: Shape) -> tuple[int, int]:
        """See `Layout.sizes`."""
        return main[0], main[1]

    def required(self, out: int, inputs: int) -> dict[str, Stored]:
        """See `Layout.required`."""
        if self.codes.bits == 4 and inputs % 2:
            raise BadCodes("weight", f"{inputs} inputs are odd")
        found = {"weight": Stored(("I8",), (out, inputs))} | self.scale(out, inputs)
        if not self.codes.symmetric:
            shape = found["weight_scale"].shape
            found["weight_zero_point"] = Stored(("I8",), shape)
        return found

    def optional(self, out: int, inputs: int) -> dict[str, Stored]:
        """See `Layout.optional`: zero points that are zero."""
        shape = self.scale(out, inputs)["weight_scale"].shape
        return {"weight_zero_point": Stored(("I8",), shape)}
