"""The coded layers of a checkpoint, checked by the headers of their tensors."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shared.checkpoint.headers import Headers
from shared.errors import InvalidRequest
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
from shared.weights.layouts.ascend import AscendLayout
from shared.weights.layouts.awq import AwqLayout
from shared.weights.layouts.bitsandbytes import Bnb4Layout, Bnb8Layout
from shared.weights.layouts.compressed_tensors import (
    BytesLayout,
    Float4Layout,
    ModeloptFloat4Layout,
    PackedLayout,
)
from shared.weights.layouts.float8 import Float8Layout
from shared.weights.layouts.gptq import GptqLayout
from shared.weights.layouts.layout import BadCodes, Layout, Stored

LAYOUTS: Mapping[str, type[Layout]] = {
    AWQ: AwqLayout,
    GPTQ: GptqLayout,
    PACKED: PackedLayout,
    BYTES: BytesLayout,
    NVFP4: Float4Layout,
    MXFP4: Float4Layout,
    MODELOPT4: ModeloptFloat4Layout,
    BNB4: Bnb4Layout,
    BNB8: Bnb8Layout,
    FLOAT8: Float8Layout,
    ASCEND: AscendLayout,
}

# Element types that are no numbers by themselves.
_CODES = ("U8", "I8", "I32", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4")
_MOST_BESIDE = 4096  # bytes of a tensor that says how a layer is stored


def split_name(codes: StoredCodes, name: str) -> tuple[str, str] | None:
    """Of a tensor of codes, or one beside them, the layer's name and what it is there; None for all others and those
    that are called as a weight of numbers is."""
    layout = LAYOUTS[codes.layout]
    layer, tensor = layout.split(name)
    known = (*layout.tensors, *layout.unused)
    return (layer, tensor) if tensor in known and tensor != "weight" else None


def is_unused(codes: StoredCodes, name: str) -> bool:
    """Whether a tensor is one that may be there and is not read, such as scales of activations."""
    layout = LAYOUTS[codes.layout]
    return layout.split(name)[1] in layout.unused


class StoredLayers:
    """All whose codes are among the tensors `names`, which are checked by their headers at once."""

    def __init__(self, headers: Headers, layout: Layout, names: Mapping[str, str]) -> None:
        """names: of each tensor the name by which it is asked for, and that in the checkpoint. Raises InvalidRequest,
        naming the tensor, for a layer that lacks one or has it in another shape or element type than the codes want,
        and for one that the configuration leaves out."""
        self.layout, self._headers, self._names = layout, headers, names
        parts = [layout.split(name) for name in names]
        self._layers = {
            layer
            for layer, tensor in parts
            if tensor in layout.tensors and (tensor != "weight" or self._is_coded(layer))
        }
        self._sizes: dict[str, tuple[int, int]] = {}
        for layer in sorted(self._layers):
            self._sizes[layer] = self._check(layer)

    def __contains__(self, layer: str) -> bool:
        return layer in self._layers

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._layers))

    @property
    def folder(self) -> Path:
        """Of the checkpoint."""
        return self._headers.folder

    def all_layers(self) -> Iterator[str]:
        """They and those that are stored as numbers, by what has a weight."""
        yield from self
        for name in self._names:
            layer, _, tensor = name.rpartition(".")
            if tensor == "weight" and layer not in self:
                yield layer

    def sizes(self, layer: str) -> tuple[int, int]:
        """Outputs and inputs."""
        return self._sizes[layer]

    def layout_of(self, layer: str) -> Layout:
        """How one layer is stored. Raises BadCodes."""
        main = self._names[f"{layer}.{self.layout.main}"]
        found = self.layout.of_layer(main, lambda tensor: self._beside(layer, tensor))
        if not found.codes.mixed:
            return found
        stored = {tensor: self._names.get(f"{layer}.{tensor}") for tensor in found.tensors}
        shapes = {tensor: self._headers.shape(name) for tensor, name in stored.items() if name}
        return found.of_shapes(shapes, self._said_shape(layer))

    def group(self, layer: str) -> int:
        """Inputs that share a scale; 0 for all of an output's."""
        return self.layout_of(layer).group

    def require_no_others(self) -> None:
        """Raises InvalidRequest for a tensor of codes that is of none of the layers, such as one of several experts."""
        for name in sorted(self._names):
            layer, tensor = self.layout.split(name)
            kind = self._headers.dtype(self._names[name])
            if kind in _CODES and not (layer in self and tensor in self.layout.tensors):
                raise InvalidRequest(
                    "UNSUPPORTED_WEIGHTS",
                    f"{self.folder}: {self._names[name]} in {kind} is of no linear layer that is stored as config.json"
                    " says; serve the model in float32, float16 or bfloat16",
                    field="model",
                )

    def require_sizes(self, layer: str, out: int, inputs: int) -> None:
        """Raises InvalidRequest, with the tensor's name, for other sizes than are stored."""
        main = self.layout.main
        try:
            expected = self.layout_of(layer).required(out, inputs)[main].shape
        except BadCodes as error:
            raise self.refusal(layer, error) from None
        found = self._headers.shape(self._names[f"{layer}.{main}"])
        if found != expected or (self.layout.main_is_flat and self._sizes[layer] != (out, inputs)):
            found = self._sizes[layer] if self.layout.main_is_flat else found
            expected = (out, inputs) if self.layout.main_is_flat else expected
            why = (
                f"config.json wants {list(expected)} for {out} outputs and {inputs} inputs, stored is"
                f" {list(found)}"
            )
            raise self.refusal(layer, BadCodes(main, why))

    def require_one_order(self, layers: Sequence[str]) -> None:
        """Raises InvalidRequest, with a tensor's name, where groups of inputs are not whole, and for layers that are
        computed as one and have their inputs in different orders."""
        first, *others = layers
        order = self.order(first)
        for layer in others:
            other = self.order(layer)
            if not _are_equal(order, other):
                why = f"{first}, with which it is computed as one, has its inputs in another order"
                raise self.refusal(layer, BadCodes(self.layout.order, why))

    def require_middle(self, layer: str) -> None:
        """Raises InvalidRequest, with the tensor's name, for a zero point that is not where the configuration says."""
        wanted = self.layout.middle_word()
        if wanted is None or f"{layer}.{wanted[0]}" not in self._names:
            return
        words = self._headers.whole_numbers(self._names[f"{layer}.{wanted[0]}"])
        if ((words & 0xFFFFFFFF) != wanted[1]).any():
            raise self.refusal(
                layer, BadCodes(wanted[0], "a zero point is not in the middle, and sym is true")
            )

    def order(self, layer: str) -> NDArray[np.int64] | None:
        """The group of each input, where they do not lie one behind the other. Raises InvalidRequest, with the tensor's
        name, for groups that have not as many inputs as they should."""
        name = f"{layer}.{self.layout.order}"
        if not self.layout.order or name not in self._names:
            return None
        _, inputs = self.sizes(layer)
        group = self.group(layer) or inputs
        found = self._headers.whole_numbers(self._names[name])
        expected = np.arange(inputs) // group
        if np.array_equal(found, expected):
            return None
        if not np.array_equal(np.sort(found), expected):
            why = f"its {-(-inputs // group)} groups have not {group} inputs each"
            raise self.refusal(layer, BadCodes(self.layout.order, why))
        return found

    def _beside(self, layer: str, tensor: str) -> bytes | None:
        stored = self._names.get(f"{layer}.{tensor}")
        if stored is None:
            return None
        kind, shape = self._headers.dtype(stored), self._headers.shape(stored)
        if kind != "U8" or math.prod(shape) > _MOST_BESIDE:
            raise BadCodes(tensor, f"it is {kind} {list(shape)} and has to be a few bytes (U8)")
        return self._headers.whole_numbers(stored).astype(np.uint8).tobytes()

    def _is_coded(self, layer: str) -> bool:
        """Whether what is called a weight is in one of the element types that codes have."""
        return self._headers.dtype(self._names[f"{layer}.weight"]) in self.layout.main_dtypes

    def _check(self, layer: str) -> tuple[int, int]:
        layout = self.layout
        main = f"{layer}.{layout.main}"
        try:
            if main not in self._names:
                raise BadCodes(layout.main, "the checkpoint lacks it")
            if layout.codes.leaves_out(self._names[main].rpartition(".")[0]):
                raise BadCodes(layout.main, "config.json says that it is not quantized")
            if layout.main != "weight" and f"{layer}.weight" in self._names:
                raise BadCodes("weight", f"it is stored beside {layout.main}")
            if layout.main == "weight" and not self._is_coded(layer):
                raise BadCodes("weight", f"it has to be {' or '.join(layout.main_dtypes)}")
            shape = self._headers.shape(self._names[main])
            if len(shape) != 2:
                raise BadCodes(layout.main, f"{list(shape)} is no matrix")
            layout = self.layout_of(layer)
            out, inputs = self._stored_sizes(layer, layout, shape)
            required = layout.required(out, inputs)
            for tensor, stored in (required | layout.optional(out, inputs)).items():
                self._check_tensor(layer, tensor, stored, tensor in required)
        except BadCodes as error:
            raise self.refusal(layer, error) from None
        return out, inputs

    def _stored_sizes(self, layer: str, layout: Layout, main: tuple[int, ...]) -> tuple[int, int]:
        """Where codes may be filled up the stored shape counts."""
        out, inputs = layout.sizes(main)
        shape = f"{layer}.weight_shape"
        if "weight_shape" in self.layout.tensors and shape in self._names:
            said = self._said_shape(layer)
            if len(said) != 2 or said[0] != out or not 0 < said[1] <= inputs:
                raise BadCodes("weight_shape", f"{said} is not the shape of {list(main)}")
            inputs = said[1]
        return out, inputs

    def _said_shape(self, layer: str) -> list[int]:
        """Empty where it is not stored, or is none."""
        stored = self._names.get(f"{layer}.weight_shape")
        if stored is None or self._headers.dtype(stored) not in ("I32", "I64"):
            return []
        if math.prod(self._headers.shape(stored)) != 2:
            return []
        said: list[int] = self._headers.whole_numbers(stored).tolist()
        return said

    def _check_tensor(self, layer: str, tensor: str, expected: Stored, required: bool) -> None:
        stored = self._names.get(f"{layer}.{tensor}")
        if stored is None:
            if required:
                raise BadCodes(tensor, "the checkpoint lacks it")
            return
        kind, shape = self._headers.dtype(stored), self._headers.shape(stored)
        if kind not in expected.dtypes or shape not in (expected.shape, expected.other):
            wanted = f"{' or '.join(expected.dtypes)} {list(expected.shape)}"
            raise BadCodes(tensor, f"it is {kind} {list(shape)} and has to be {wanted}")

    def refusal(self, layer: str, error: BadCodes) -> InvalidRequest:
        """The error of one of its tensors, by the name that it has in the checkpoint or would have."""
        name = f"{layer}.{error.tensor}"
        main = self._names.get(f"{layer}.{self.layout.main}")
        stem = layer if main is None else main.rpartition(".")[0]
        shown = self._names.get(name, f"{stem}.{error.tensor}")
        return InvalidRequest(
            "UNSUPPORTED_WEIGHTS",
            f"{self.folder}: {shown} cannot be used: {error}",
            field="model",
        )


def _are_equal(order: NDArray[np.int64] | None, other: NDArray[np.int64] | None) -> bool:
    if order is None or other is None:
        return order is other
    return np.array_equal(order, other)
