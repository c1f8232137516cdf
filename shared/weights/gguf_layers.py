"""The linear layers of a GGUF file: each has an element type of its own."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial

import structlog
import torch
from torch import Tensor

from shared.checkpoint.files import GGUF
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.gguf.architecture import stored_name
from shared.checkpoint.gguf.block_types import CODED
from shared.checkpoint.weight_reader import WeightReader
from shared.errors import InvalidRequest
from shared.weights.coded_rows import CodedRows, Table
from shared.weights.layouts.layout import NOT_FINITE
from shared.weights.linear_weight import CodedWeight, LinearWeight, NearlyCodedWeight, StoredWeight
from shared.weights.on_the_fly import quantize
from shared.weights.quantized_weight import QuantizedWeight
from shared.weights.readers.gguf import is_exact, read_blocks, read_numbers
from shared.weights.scheme import Scheme
from shared.weights.stacked_codes import stacked

log = structlog.get_logger(__name__)

_AT_ONCE = 1 << 24  # elements whose blocks are taken apart together
# Layers that are computed as one, and are all codes where one of them is.
_AS_ONE = (
    re.compile(r"(.*\.self_attn\.)[qkv]_proj\.weight"),
    re.compile(r"(.*\.mlp\.)(?:gate|up)_proj\.weight"),
)
_OF_NUMBERS = Scheme(8, 32, 2)


class GgufLayers:
    """All matrices among the tensors `names`, by their layers."""

    def __init__(self, checkpoint: Checkpoint, names: Mapping[str, str]) -> None:
        """names: as of `NamedWeights`."""
        self._checkpoint, self._names = checkpoint, names
        kinds = {name: checkpoint.dtype(stored) for name, stored in names.items()}
        found = (_as_one(name) for name, kind in kinds.items() if kind in CODED)
        self._coded_groups = {group for group in found if group}
        if made := Counter(kind for kind in kinds.values() if kind in CODED and not is_exact(kind)):
            log.warning(
                "tensors of these types have no codes of their own here: they become codes of 8 bits in groups of 32",
                types=dict(made),
            )

    def __contains__(self, layer: str) -> bool:
        return f"{layer}.weight" in self._names

    def tensors_of(self, layer: str) -> Iterator[str]:
        """The name of its weight."""
        yield f"{layer}.weight"

    def take(
        self, layer: str, out: int, inputs: int, bias: Tensor | None, reader: WeightReader
    ) -> LinearWeight:
        """See `CodedLayers.take`; outputs in the order in which transformers has them."""
        name = f"{layer}.weight"
        stored = self._names[name]
        found = self._checkpoint.shape(stored)
        if found != (out, inputs):
            raise self._bad(
                "BAD_CHECKPOINT",
                f"config.json says {[out, inputs]} but stored is {list(found)}: {stored}",
            )
        kind = self._checkpoint.dtype(stored)
        weight: LinearWeight = StoredWeight(layer, out, inputs, bias, partial(reader.part, stored))
        if kind in CODED and is_exact(kind):
            read = partial(self._read_codes, stored, kind, inputs, reader)
            weight = CodedWeight(layer, out, inputs, bias, read)
        elif kind in CODED:
            numbers = partial(self._read_numbers, stored, kind, inputs, reader)
            weight = _quantized_here(StoredWeight(layer, out, inputs, bias, numbers))
        elif _as_one(name) in self._coded_groups:
            log.info(
                "becomes codes of 8 bits, as its neighbours are codes", tensor=stored, type=kind
            )
            weight = _quantized_here(weight)
        order = self._checkpoint.order(stored)
        return weight if order is None else weight.reordered(order)

    def take_table(self, name: str, reader: WeightReader) -> Table:
        """A matrix of which single rows are wanted: mapped, codes as they are stored."""
        stored = self._names[name]
        kind = self._checkpoint.dtype(stored)
        found = reader.tensor(stored)
        if kind not in CODED:
            return found
        width = self._checkpoint.shape(stored)[1]
        if is_exact(kind):
            return CodedRows(
                found, width, lambda rows: read_blocks(kind, rows).dequantize(torch.float32)
            )
        return CodedRows(found, width, partial(read_numbers, kind))

    def require_numbers(self, name: str) -> None:
        """Raises InvalidRequest for a tensor of codes that is used as numbers."""
        stored = self._names[name]
        if (kind := self._checkpoint.dtype(stored)) in CODED:
            raise self._bad("UNSUPPORTED_WEIGHTS", f"{stored} is {kind} and has to be numbers")

    def _read_codes(
        self, stored: str, kind: str, inputs: int, reader: WeightReader, rows: slice
    ) -> QuantizedWeight:
        blocks = reader.part(stored, rows, slice(0, inputs))
        found = stacked(
            [read_blocks(kind, part) for part in blocks.split(max(1, _AT_ONCE // inputs))]
        )
        if not found.is_finite:
            shown = stored_name(self._checkpoint.folder / GGUF, stored)
            raise self._bad(
                "UNSUPPORTED_WEIGHTS",
                f"the tensor {shown} cannot be used: {NOT_FINITE}; download the file again",
            )
        return found

    @staticmethod
    def _read_numbers(
        stored: str, kind: str, inputs: int, reader: WeightReader, rows: slice, columns: slice
    ) -> Tensor:
        return read_numbers(kind, reader.part(stored, rows, slice(0, inputs)))[:, columns]

    def _bad(self, reason: str, what: str) -> InvalidRequest:
        return InvalidRequest(reason, f"{self._checkpoint.origin}: {what}", field="model")


def _quantized_here(numbers: LinearWeight) -> LinearWeight:
    def codes_of(rows: slice) -> QuantizedWeight:
        return quantize(numbers.shard("out", [(rows.start, rows.stop)]), _OF_NUMBERS)

    return NearlyCodedWeight(numbers, codes_of)


def _as_one(name: str) -> str:
    """Equal for layers that are computed as one; empty for all others."""
    found = (pattern.fullmatch(name) for pattern in _AS_ONE)
    return next((match[1] for match in found if match), "")
