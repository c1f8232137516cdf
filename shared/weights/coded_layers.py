"""The linear layers of a checkpoint that are stored as codes."""

from collections.abc import Iterator, Mapping
from functools import partial

from torch import Tensor

from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.weight_reader import WeightReader
from shared.errors import InvalidRequest
from shared.model_config.quantization import AWQ, BYTES, GPTQ, PACKED, StoredCodes
from shared.weights.linear_weight import CodedWeight, LinearWeight
from shared.weights.quantized_weight import QuantizedWeight
from shared.weights.readers.awq import Awq
from shared.weights.readers.compressed_tensors import IntQuantized, PackQuantized
from shared.weights.readers.gptq import Gptq
from shared.weights.readers.layout import BadCodes, Layout, Stored

_LAYOUTS: Mapping[str, type[Layout]] = {
    AWQ: Awq,
    GPTQ: Gptq,
    PACKED: PackQuantized,
    BYTES: IntQuantized,
}


def split_name(codes: StoredCodes, name: str) -> tuple[str, str] | None:
    """Of a tensor of codes, or one beside them, the layer's name and what it is there; None for all others and those
    that are called as a weight of numbers is."""
    layer, _, tensor = name.rpartition(".")
    layout = _LAYOUTS[codes.layout]
    known = (*layout.tensors, *layout.unused)
    return (layer, tensor) if tensor in known and tensor != "weight" else None


def is_unused(codes: StoredCodes, name: str) -> bool:
    """Whether a tensor is one that may be there and is not read, such as scales of activations."""
    return name.rpartition(".")[2] in _LAYOUTS[codes.layout].unused


class CodedLayers:
    """All whose codes are among the tensors `names`, which are checked by their headers at once."""

    def __init__(
        self, checkpoint: Checkpoint, codes: StoredCodes, names: Mapping[str, str]
    ) -> None:
        """names: as of `NamedWeights`. Raises InvalidRequest, naming the tensor, for a layer that lacks one or has it
        in another shape or element type than the codes want, and for one that the configuration leaves out."""
        self._checkpoint, self._names = checkpoint, names
        self._layout = _LAYOUTS[codes.layout](codes)
        parts = [name.rpartition(".") for name in names]
        self._layers = {
            layer
            for layer, _, tensor in parts
            if tensor in self._layout.tensors and (tensor != "weight" or self._is_coded(layer))
        }
        for layer in sorted(self._layers):
            self._check(layer)

    def __contains__(self, layer: str) -> bool:
        return layer in self._layers

    def tensors_of(self, layer: str) -> Iterator[str]:
        """The names of what is stored of it, but for a bias."""
        return (n for n in self._possible(layer) if n in self._names)

    def take(
        self, layer: str, out: int, inputs: int, bias: Tensor | None, reader: WeightReader
    ) -> LinearWeight:
        """It as a weight that is read when it is packed. Raises InvalidRequest for other sizes than are stored."""
        stored = _Tensors(self._checkpoint, self._names, layer, reader)
        main = self._layout.main
        try:
            required = self._layout.required(out, inputs)
        except BadCodes as error:
            raise self._bad(layer, error) from None
        found = self._checkpoint.shape(stored.name(main))
        if found != required[main].shape:
            expected = list(required[main].shape)
            why = f"config.json wants {expected} for {out} outputs and {inputs} inputs, stored is {list(found)}"
            raise self._bad(layer, BadCodes(main, why))
        read = partial(self._read, layer, stored, inputs)
        return CodedWeight(layer, out, inputs, bias, read)

    def _read(self, layer: str, tensors: "_Tensors", inputs: int, rows: slice) -> QuantizedWeight:
        try:
            return self._layout.read(tensors, inputs, rows)
        except BadCodes as error:
            raise self._bad(layer, error) from None

    def _is_coded(self, layer: str) -> bool:
        """Whether what is called a weight is in one of the element types that codes have."""
        return self._checkpoint.dtype(self._names[f"{layer}.weight"]) in self._layout.main_dtypes

    def _check(self, layer: str) -> None:
        main = f"{layer}.{self._layout.main}"
        try:
            if main not in self._names:
                raise BadCodes(self._layout.main, "the checkpoint lacks it")
            if self._layout.codes.leaves_out(self._names[main].rpartition(".")[0]):
                raise BadCodes(self._layout.main, "config.json says that it is not quantized")
            if self._layout.main != "weight" and f"{layer}.weight" in self._names:
                raise BadCodes("weight", f"it is stored beside {self._layout.main}")
            shape = self._checkpoint.shape(self._names[main])
            if len(shape) != 2:
                raise BadCodes(self._layout.main, f"{list(shape)} is no matrix")
            out, inputs = self._sizes(layer, shape)
            required = self._layout.required(out, inputs)
            for tensor, stored in (required | self._layout.optional(out, inputs)).items():
                self._check_tensor(layer, tensor, stored, tensor in required)
        except BadCodes as error:
            raise self._bad(layer, error) from None

    def _sizes(self, layer: str, main: tuple[int, ...]) -> tuple[int, int]:
        """Where codes may be filled up the stored shape counts."""
        out, inputs = self._layout.sizes(main)
        shape = f"{layer}.weight_shape"
        if "weight_shape" in self._layout.tensors and shape in self._names:
            said = [int(size) for size in self._checkpoint.tensor(self._names[shape]).flatten()]
            if len(said) != 2 or said[0] != out or not 0 < said[1] <= inputs:
                raise BadCodes("weight_shape", f"{said} is not the shape of {list(main)}")
            inputs = said[1]
        return out, inputs

    def _check_tensor(self, layer: str, tensor: str, expected: Stored, required: bool) -> None:
        stored = self._names.get(f"{layer}.{tensor}")
        if stored is None:
            if required:
                raise BadCodes(tensor, "the checkpoint lacks it")
            return
        kind, shape = self._checkpoint.dtype(stored), self._checkpoint.shape(stored)
        if kind not in expected.dtypes or shape != expected.shape:
            wanted = f"{' or '.join(expected.dtypes)} {list(expected.shape)}"
            raise BadCodes(tensor, f"it is {kind} {list(shape)} and has to be {wanted}")

    def _possible(self, layer: str) -> Iterator[str]:
        return (f"{layer}.{tensor}" for tensor in self._layout.tensors)

    def _bad(self, layer: str, error: BadCodes) -> InvalidRequest:
        name = f"{layer}.{error.tensor}"
        main = self._names.get(f"{layer}.{self._layout.main}")
        stem = layer if main is None else main.rpartition(".")[0]
        shown = self._names.get(name, f"{stem}.{error.tensor}")
        return InvalidRequest(
            "UNSUPPORTED_WEIGHTS",
            f"{self._checkpoint.folder}: {shown} cannot be used: {error}",
            field="model",
        )


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
