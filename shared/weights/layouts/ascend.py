"""msmodelslim: codes of 8 and of 4 bits as vllm-ascend and MindIE read them."""

from shared.weights.layouts.layout import SCALES, BadCodes, Beside, Layout, Shape, Stored

_STEPS = ("I64", "F32")  # of products; the former has the bits of the latter


class AscendLayout(Layout):
    """`weight` int8 [out, inputs]. Of layers whose activations have one step for all `input_scale` and `input_offset`
    [1], `deq_scale` [out], which is that step times a weight's, and `quant_bias` int32 [out]; of all others
    `weight_scale` and `weight_offset` [out, groups]. Layers of 4 bits: `NarrowAscendLayout`."""

    main = "weight"
    tensors = (
        "weight",
        "weight_scale",
        "weight_offset",
        "weight_scale_second",
        "weight_offset_second",
        "input_scale",
        "input_offset",
        "deq_scale",
        "quant_bias",
    )
    unused = ("scale_bias",)
    main_dtypes = ("I8",)

    def of_layer(self, main: str, beside: Beside) -> Layout:
        """See `Layout.of_layer`."""
        return NarrowAscendLayout(self.codes) if self.codes.has_narrow_codes(main) else self

    def sizes(self, main: Shape) -> tuple[int, int]:
        """See `Layout.sizes`."""
        return main[0], main[1]

    def required(self, out: int, inputs: int) -> dict[str, Stored]:
        """See `Layout.required`; which others a layer needs is seen when it is read."""
        return {"weight": Stored(("I8",), (out, inputs))}

    def optional(self, out: int, inputs: int) -> dict[str, Stored]:
        """See `Layout.optional`."""
        group = self.codes.group
        if group and inputs % group and self.codes.narrow:  # whose groups these may be
            group = 0
        if group and inputs % group:
            raise BadCodes("weight_scale", f"{inputs} inputs do not divide into groups of {group}")
        # W8A16 may be in groups, beside layers that are not.
        scales = Stored((*SCALES, "I8"), (out, 1), (out, inputs // group) if group else (out,))
        one = (*SCALES, "I8")
        return {
            "weight_scale": scales,
            "weight_offset": scales,
            "input_scale": Stored(SCALES, (1,)),
            "input_offset": Stored(one, (1,)),
            "deq_scale": Stored(_STEPS, (out,)),
            "quant_bias": Stored(("I32",), (out,)),
        }


class NarrowAscendLayout(AscendLayout):
    """W4A8: `weight` int8 [out, inputs] of -8 to 7, or [out / 2, inputs] with the output before in the lower half of a
    byte; `weight_scale` [out], which with groups is to be multiplied with `weight_scale_second` [out, groups]. The
    offsets beside these are 0. `scale_bias`, 8 times the sum of an output's numbers, is no part of the layer: kernels
    want it that split activations of 8 bits in halves."""

    def of_layer(self, main: str, beside: Beside) -> Layout:
        """See `Layout.of_layer`."""
        return self

    def sizes(self, main: Shape) -> tuple[int, int]:
        """See `Layout.sizes`."""
        return main[0] * self._each, main[1]

    def required(self, out: int, inputs: int) -> dict[str, Stored]:
        """See `Layout.required`."""
        if out % self._each or inputs % 2:
            raise BadCodes("weight", f"codes of 4 bits for {out} outputs and {inputs} inputs")
        required = {
            "weight": Stored(("I8",), (out // self._each, inputs)),
            "weight_scale": Stored(SCALES, (out, 1), (out,)),
        }
        group = self.codes.group
        if group and inputs % group:
            raise BadCodes(
                "weight_scale_second", f"{inputs} inputs do not divide into groups of {group}"
            )
        return required | ({"weight_scale_second": self._of_groups(out, inputs)} if group else {})

    def optional(self, out: int, inputs: int) -> dict[str, Stored]:
        """See `Layout.optional`."""
        return {
            "weight_offset": Stored((*SCALES, "I8"), (out, 1), (out,)),
            "weight_scale_second": self._of_groups(out, inputs),
            "weight_offset_second": self._of_groups(out, inputs, "I8"),
        }

    def _of_groups(self, out: int, inputs: int, *others: str) -> Stored:
        return Stored((*SCALES, *others), (out, inputs // (self.codes.group or inputs)))

    @property
    def _each(self) -> int:
        """Outputs of a row of bytes."""
        return 2 if self.codes.two_a_byte else 1
