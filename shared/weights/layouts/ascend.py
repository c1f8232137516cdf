"""msmodelslim: codes of 8 bits as vllm-ascend and MindIE read them."""

from shared.weights.layouts.layout import SCALES, BadCodes, Layout, Shape, Stored

_STEPS = ("I64", "F32")  # of products; the former has the bits of the latter


class AscendLayout(Layout):
    """`weight` int8 [out, inputs]. Of layers whose activations have one step for all `input_scale` and `input_offset`
    [1], `deq_scale` [out], which is that step times a weight's, and `quant_bias` int32 [out]; of all others
    `weight_scale` and `weight_offset` [out, groups]."""

    main = "weight"
    tensors = (
        "weight",
        "weight_scale",
        "weight_offset",
        "input_scale",
        "input_offset",
        "deq_scale",
        "quant_bias",
    )
    main_dtypes = ("I8",)

    def sizes(self, main: Shape) -> tuple[int, int]:
        """See `Layout.sizes`."""
        return main[0], main[1]

    def required(self, out: int, inputs: int) -> dict[str, Stored]:
        """See `Layout.required`; which others a layer needs is seen when it is read."""
        return {"weight": Stored(("I8",), (out, inputs))}

    def optional(self, out: int, inputs: int) -> dict[str, Stored]:
        """See `Layout.optional`."""
        group = self.codes.group
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
