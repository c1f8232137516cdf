"""GPTQ as AutoGPTQ ("gptq") and GPTQModel ("gptq_v2") store it: words along inputs."""

from collections.abc import Mapping, Sequence

from shared.weights.layouts.layout import INDEX, SCALES, WORDS, BadCodes, Layout, Shape, Stored


class GptqLayout(Layout):
    """`qweight` [inputs / per word, out], `qzeros` [groups, out / per word], `scales` [groups, out], and `g_idx`
    [inputs], the group of each. Zero points of "gptq" are stored less one."""

    main = "qweight"
    scales = "scales"
    tensors = ("qweight", "qzeros", "scales", "g_idx")
    order = "g_idx"

    def of_shapes(self, shapes: Mapping[str, Shape], said: Sequence[int]) -> Layout:
        """See `Layout.of_shapes`: zero points are words along outputs."""
        found = [shapes.get(tensor, ()) for tensor in ("qweight", "qzeros", "scales")]
        for tensor, shape in zip(("qweight", "qzeros", "scales"), found, strict=True):
            if len(shape) != 2:
                raise BadCodes(tensor, "the checkpoint lacks it, or it is no matrix")
        (words, out), (_, of_zeros), (groups, _) = found
        bits = next((bits for bits in (4, 8) if 32 * of_zeros == bits * out), 0)
        if not bits:
            raise BadCodes(
                "qzeros", f"{of_zeros} words for {out} outputs have not 4 or 8 bits each"
            )
        return self.with_own(bits, words * 32 // bits, groups, symmetric=False)

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

    def middle_word(self) -> tuple[str, int] | None:
        """See `Layout.middle_word`."""
        if not self.codes.symmetric:
            return None
        bits = self.codes.bits
        stored = 2 ** (bits - 1) - self.codes.zero_shift
        return "qzeros", sum(stored << bits * place for place in range(self.per_word))

    @staticmethod
    def _index(inputs: int) -> dict[str, Stored]:
        return {"g_idx": Stored(INDEX, (inputs,))}
