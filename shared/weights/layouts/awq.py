"""AWQ as AutoAWQ's "gemm" stores it: words along outputs, eight codes in an order of their own."""

from shared.weights.layouts.layout import SCALES, WORDS, BadCodes, Layout, Shape, Stored

WORD = 8  # codes of one


class AwqLayout(Layout):
    """`qweight` [inputs, out / 8], `qzeros` [groups, out / 8], `scales` [groups, out]."""

    main = "qweight"
    scales = "scales"
    tensors = ("qweight", "qzeros", "scales")

    def sizes(self, main: Shape) -> tuple[int, int]:
        """See `Layout.sizes`."""
        return main[1] * WORD, main[0]

    def required(self, out: int, inputs: int) -> dict[str, Stored]:
        """See `Layout.required`."""
        if out % WORD or inputs % 2:
            raise BadCodes("qweight", f"{out} outputs are no multiple of 8, or {inputs} inputs odd")
        groups = self.groups(inputs)
        return {
            "qweight": Stored(WORDS, (inputs, out // WORD)),
            "qzeros": Stored(WORDS, (groups, out // WORD)),
            "scales": Stored(SCALES, (groups, out)),
        }
