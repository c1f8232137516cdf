"""The linear layers of a checkpoint that are stored as codes."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TypeAlias

from torch import Tensor

from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.weight_reader import WeightReader
from shared.model_config.quantization import (
    ASCEND,
    AWQ,
    BNB4,
    BNB8,
    BYTES,
    FLOAT8,
    GPTQ,
    MODELOPT4,
    MXFP4,
    NVFP4,
    PACKED,
    StoredCodes,
)
from shared.weights.layouts.bitsandbytes import Bnb4Layer
from shared.weights.layouts.layout import NOT_FINITE, BadCodes
from shared.weights.layouts.stored_layers import StoredLayers
from shared.weights.linear_weight import (
    CodedWeight,
    LinearWeight,
    NearlyCodedWeight,
    StoredWeight,
)
from shared.weights.quantized_weight import QuantizedWeight
from shared.weights.readers.ascend import Ascend
from shared.weights.readers.awq import Awq
from shared.weights.readers.bitsandbytes import Bnb4, Bnb8
from shared.weights.readers.compressed_tensors import (
    Float4,
    IntQuantized,
    ModeloptFloat4,
    PackQuantized,
)
from shared.weights.readers.float8 import Float8
from shared.weights.readers.gptq import Gptq

_Codes: TypeAlias = (
    Awq | Gptq | PackQuantized | IntQuantized | Float4 | ModeloptFloat4 | Ascend | Bnb4 | Bnb8
)
_READERS: Mapping[str, type[_Codes | Float8]] = {
    AWQ: Awq,
    GPTQ: Gptq,
    PACKED: PackQuantized,
    BYTES: IntQuantized,
    NVFP4: Float4,
    MXFP4: Float4,
    MODELOPT4: ModeloptFloat4,
    BNB4: Bnb4,
    BNB8: Bnb8,
    FLOAT8: Float8,
    ASCEND: Ascend,
}


class CodedLayers:
    """All whose codes are among the tensors `names`, which are checked by their headers at once."""

    def __init__(
        self, checkpoint: Checkpoint, codes: StoredCodes, names: Mapping[str, str]
    ) -> None:
        """names: as of `NamedWeights`. Raises InvalidRequest as `StoredLayers` does."""
        self._checkpoint, self._names = checkpoint, names
        self._layout = _READERS[codes.layout](codes)
        self._stored = StoredLayers(checkpoint, self._layout, names)

    def __contains__(self, layer: str) -> bool:
        return layer in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def require_no_others(self) -> None:
        """See `StoredLayers.require_no_others`."""
        self._stored.require_no_others()

    def sizes(self, layer: str) -> tuple[int, int]:
        """Outputs and inputs."""
        return self._stored.sizes(layer)

    def tensors_of(self, layer: str) -> Iterator[str]:
        """The names of what is stored of it, but for a bias."""
        possible = (f"{layer}.{tensor}" for tensor in self._layout.tensors)
        return (name for name in possible if name in self._names)

    def has_bias(self, layer: str) -> bool:
        """Whether its codes have its bias too."""
        return isinstance(self._layout, Ascend) and f"{layer}.quant_bias" in self._names

    def take(
        self, layer: str, out: int, inputs: int, bias: Tensor | None, reader: WeightReader
    ) -> LinearWeight:
        """It as a weight that is read when it is packed; bias: what is stored beside codes that have none. Raises
        InvalidRequest for other sizes than are stored."""
        self._stored.require_sizes(layer, out, inputs)
        tensors, layout = _Tensors(self._checkpoint, self._names, layer, reader), self._layout
        if isinstance(layout, Gptq | PackQuantized):
            own = self._stored.layout_of(layer)  # of the same class
            assert isinstance(own, Gptq | PackQuantized)
            layout = own
        if isinstance(layout, Float8):
            numbers = partial(self._numbers, layout, layer, tensors)
            return StoredWeight(layer, out, inputs, bias, numbers)
        if isinstance(layout, Ascend) and self.has_bias(layer):
            bias = self._bias(layout, layer, tensors)
        read = partial(self._read, layout, layer, tensors, inputs)
        if isinstance(layout, Bnb4):
            weight = StoredWeight(
                layer, out, inputs, bias, partial(self._numbers, layout, layer, tensors)
            )
            own = self._stored.layout_of(layer)
            is_grouped = isinstance(own, Bnb4Layer) and own.has_whole_blocks
            return NearlyCodedWeight(weight, read) if is_grouped else weight
        return CodedWeight(layer, out, inputs, bias, read)

    def _read(
        self,
        layout: _Codes,
        layer: str,
        tensors: "_Tensors",
        inputs: int,
        rows: slice,
    ) -> QuantizedWeight:
        try:
            found = layout.read(tensors, inputs, rows)
            if not found.is_finite:
                raise BadCodes(layout.scales, NOT_FINITE)
        except BadCodes as error:
            raise self._stored.refusal(layer, error) from None
        return found

    def _numbers(
        self, layout: Float8 | Bnb4, layer: str, tensors: "_Tensors", rows: slice, columns: slice
    ) -> Tensor:
        try:
            return layout.numbers(tensors, rows, columns)
        except BadCodes as error:
            raise self._stored.refusal(layer, error) from None

    def _bias(self, layout: Ascend, layer: str, tensors: "_Tensors") -> Tensor | None:
        try:
            return layout.bias(tensors)
        except BadCodes as error:
            raise self._stored.refusal(layer, error) from None


class _Tensors:
    """Those of one layer; see `Tensors`."""

    def __init__(
        self, checkpoint: Checkpoint, names: Mapping[str, str], layer: str, reader: WeightReader
    ) -> None:
        self._checkpoint, self._names = checkpoint, names
        self._layer, self._reader = layer, reader

    def has(self, tensor: str) -> bool:
        return f"{self._layer}.{tensor}" in self._names

    def name(self, tensor: str) -> str:
        """In the checkpoint."""
        return self._names[f"{self._layer}.{tensor}"]

    def whole(self, tensor: str) -> Tensor:
        return self._reader.tensor(self.name(tensor))

    def part(self, tensor: str, rows: slice, columns: slice) -> Tensor:
        sizes = self._checkpoint.shape(self.name(tensor))
        first, second = (
            slice(places.start or 0, size if places.stop is None else places.stop)
            for places, size in zip((rows, columns), sizes, strict=True)
        )
        return self._reader.part(self.name(tensor), first, second)
