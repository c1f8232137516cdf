"""The tensors of one part of a model, such as its decoder or its tower, by names that no checkpoint's age changes."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from torch import Tensor

from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.weight_reader import WeightReader
from shared.errors import InvalidRequest
from shared.model_config.quantization import StoredCodes
from shared.weights.coded_layers import CodedLayers
from shared.weights.coded_rows import Table
from shared.weights.gguf_layers import GgufLayers
from shared.weights.linear_weight import LinearWeight, StoredWeight, as_numbers

# Element types that are numbers by themselves, as safetensors spells them.
_NUMBERS = ("F64", "F32", "BF16", "F16")


class NamedWeights:
    """Tensors of a checkpoint, taken one by one: each must be there, in the shape that config.json says, and `finish`
    checks that none is left."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        names: Mapping[str, str],
        codes: StoredCodes | None = None,
        *,
        keeps_codes: bool = True,
    ) -> None:
        """names: of each tensor the name by which it is taken, and that in the checkpoint; codes: how linear layers may
        be stored; keeps_codes: whether such a layer is given as codes, else as the numbers that they stand for. Raises
        InvalidRequest for layers of codes that are not stored as these say."""
        self._checkpoint = checkpoint
        self._names = names
        self._taken: set[str] = set()
        self._keeps_codes = keeps_codes
        self._coded: CodedLayers | GgufLayers | None = None
        self._blocks = GgufLayers(checkpoint, names) if checkpoint.is_gguf else None
        if codes is not None:
            self._coded = CodedLayers(checkpoint, codes, names)
        else:
            self._coded = self._blocks
        self._reader = WeightReader(checkpoint, names.values())

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def has_linear(self, name: str) -> bool:
        """Whether a linear layer is stored, as numbers or codes."""
        return f"{name}.weight" in self or (self._coded is not None and name in self._coded)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor as it is stored. Raises InvalidRequest if it is missing."""
        return self._checkpoint.shape(self._stored(name))

    def take(self, name: str, *shape: int) -> Tensor:
        """One tensor, mapped. Raises InvalidRequest if it is missing or has another shape."""
        stored = self._claim(name, shape)
        if self._blocks is not None:
            self._blocks.require_numbers(name)
        return self._reader.tensor(stored)

    def take_table(self, name: str, count: int, width: int) -> Table:
        """A matrix [count, width] of which single rows are wanted: mapped, and as codes where it is stored so. Raises
        InvalidRequest as `take` does."""
        if self._blocks is None:
            return self.take(name, count, width)
        self._claim(name, (count, width))
        return self._blocks.take_table(name, self._reader)

    def take_linear(
        self, name: str, out: int, inputs: int, bias: bool = False, factor: float = 1
    ) -> LinearWeight:
        """A linear layer: the tensors `name`.weight [out, inputs], or those of its codes, and, with `bias`, `name`.bias
        [out]. The weight is read when it is packed, of a shard nothing but its part; it is multiplied by `factor` in
        the type in which it is stored, and is not codes then. Raises InvalidRequest as `take` does, and for codes that
        are not read."""
        if factor == 1 and self._coded is not None and name in self._coded:
            self._taken.update(self._coded.tensors_of(name))
            if isinstance(self._coded, CodedLayers) and self._coded.has_bias(name):
                self._taken.add(f"{name}.bias")  # which may be there as well
                bias = False
            added = self.take(f"{name}.bias", out) if bias else None
            found = self._coded.take(name, out, inputs, added, self._reader)
            return found if self._keeps_codes else as_numbers(found)
        stored = self._claim_weight(name, (out, inputs))
        shift = self.take(f"{name}.bias", out) if bias else None
        read = partial(self._reader.part, stored)

        def scaled(rows: slice, columns: slice) -> Tensor:
            return read(rows, columns) * factor

        return StoredWeight(name, out, inputs, shift, read if factor == 1 else scaled)

    def take_convolution(
        self, name: str, out: int, *kernel: int, bias: bool = False
    ) -> LinearWeight:
        """A convolution whose steps are as wide as its kernel, such as that of patches, as the linear layer that it is:
        the tensors `name`.weight [out, *kernel], of which each output's become its inputs, and `name`.bias [out]. See
        `take_linear`."""
        stored = self._claim_weight(name, (out, *kernel))
        shift = self.take(f"{name}.bias", out) if bias else None

        def read(rows: slice, columns: slice) -> Tensor:
            return self._reader.tensor(stored).flatten(1)[rows, columns]

        return StoredWeight(name, out, math.prod(kernel), shift, read)

    def finish(self) -> None:
        """Once everything is packed: says how long that took. Raises InvalidRequest for tensors that were never asked
        for."""
        if left := self._left():
            raise self._bad("config.json has no use for", [self._names[name] for name in left])
        self._reader.finish()

    def _left(self) -> list[str]:
        return sorted(name for name in self._names if name not in self._taken)

    def _claim_weight(self, layer: str, shape: tuple[int, ...]) -> str:
        """`_claim` for a layer's weight."""
        name, bias = f"{layer}.weight", f"{layer}.bias"
        stored = self._names.get(name)
        if stored is None:
            parts = [part for part in self if part.startswith(f"{layer}.") and part != bias]
            if parts:
                found = ", ".join(sorted(self._names[part] for part in parts))
                raise self._quantized(f"{found} in the place of a weight")
        elif (kind := self._checkpoint.dtype(stored)) not in _NUMBERS:
            raise self._quantized(f"{stored} in {kind}")
        return self._claim(name, shape)

    def _claim(self, name: str, shape: tuple[int, ...]) -> str:
        """The name in the checkpoint of a tensor that has this shape; it counts as taken."""
        stored = self._stored(name)
        found = self._checkpoint.shape(stored)
        if found != shape:
            raise self._bad(
                f"config.json says {list(shape)} but stored is {list(found)}:", [stored]
            )
        self._taken.add(name)
        return stored

    def _stored(self, name: str) -> str:
        if name not in self._names:
            raise self._bad("the checkpoint lacks", [name])
        return self._names[name]

    def _quantized(self, what: str) -> InvalidRequest:
        return InvalidRequest(
            "UNSUPPORTED_WEIGHTS",
            f"{self._checkpoint.folder} has {what}: codes of this kind are not read here; serve the model in float32,"
            " float16 or bfloat16",
            field="model",
        )

    def _bad(self, what: str, names: Sequence[str]) -> InvalidRequest:
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        return InvalidRequest(
            "BAD_CHECKPOINT", f"{self._checkpoint.folder}: {what} {shown}", field="model"
        )
