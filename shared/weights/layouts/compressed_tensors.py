"""compressed-tensors: codes of 4 or 8 bits in words along inputs ("pack-quantized"), or of 8 bits ("int-quantized")."""

from shared.weights.layouts.layout import INDEX, SCALES, WORDS, BadCodes, Layout, Shape, Stored

OF_ACTIVATIONS = ("input_scale", "input_zero_point", "output_scale", "output_zero_point")


class CompressedLayout(Layout):
    """What both have."""

    unused = OF_ACTIVATIONS

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


class BytesLayout(CompressedLayout):
    """`weight` int8 [out, inputs], `weight_scale` [out, groups] or [1], and `weight_zero_point` int8 alike."""

    main = "weight"
    tensors = ("weight", "weight_scale", "weight_zero_point")
    main_dtypes = ("I8",)

    def sizes(self, main: Shape) -> tuple[int, int]:
        """See `Layout.sizes`."""
        return main[0], main[1]

    def required(self, out: int, inputs: int) -> dict[str, Stored]:
        """See `Layout.required`."""
        found = {"weight": Stored(("I8",), (out, inputs))} | self.scale(out, inputs)
        if not self.codes.symmetric:
            shape = found["weight_scale"].shape
            found["weight_zero_point"] = Stored(("I8",), shape)
        return found

    def optional(self, out: int, inputs: int) -> dict[str, Stored]:
        """See `Layout.optional`: zero points that are zero."""
        shape = self.scale(out, inputs)["weight_scale"].shape
        return {"weight_zero_point": Stored(("I8",), shape)}
