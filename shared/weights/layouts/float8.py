"""Numbers of 8 bits (e4m3) with scales of a whole layer, of its outputs or of blocks: as DeepSeek and Qwen3-FP8 have
them ("fp8"), Model Optimizer, and compressed-tensors ("float-quantized")."""

from shared.model_config.quantization import StoredCodes
from shared.weights.layouts.compressed_tensors import OF_ACTIVATIONS, OF_CACHE
from shared.weights.layouts.layout import SCALES, Layout, Shape, Stored

_NUMBERS = ("F8_E4M3",)


class Float8Layout(Layout):
    """`weight` e4m3 [out, inputs]; `weight_scale`, of "fp8" with blocks `weight_scale_inv`: of one number, or [out, 1],
    or [out / block, inputs / block], rounded up. What is stored times its scale is the weight."""

    main = "weight"
    tensors = ("weight", "weight_scale", "weight_scale_inv")
    unused = (*OF_ACTIVATIONS, *OF_CACHE, "activation_scale")
    main_dtypes = _NUMBERS

    def __init__(self, codes: StoredCodes) -> None:
        super().__init__(codes)
        self.scale = "weight_scale_inv" if codes.inverse_name else "weight_scale"

    def sizes(self, main: Shape) -> tuple[int, int]:
        """See `Layout.sizes`."""
        return main[0], main[1]

    def required(self, out: int, inputs: int) -> dict[str, Stored]:
        """See `Layout.required`."""
        return {
            "weight": Stored(_NUMBERS, (out, inputs)),
            self.scale: self._scale(out, inputs),
        }

    def _scale(self, out: int, inputs: int) -> Stored:
        if self.codes.block is not None:
            rows, columns = self.codes.block
            return Stored(SCALES, (-(-out // rows), -(-inputs // columns)))
        if self.codes.one_scale:
            return Stored(SCALES, (1,), ())
        return Stored(SCALES, (out, 1))
