"""A linear layer's weight between a checkpoint and `ops.pack`: read when it is asked for, in the form then wanted."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Axis = Literal["out", "in"]
Range = tuple[int, int]  # [first, last)


@dataclass(frozen=True)
class QuantizedWeight:
    """Codes and what makes numbers of them: (code - zero) * scale + minimum, or codebook[code] * scale."""

    codes: Tensor  # uint8 [out, inputs], of 4 bits two a byte
    scales: Tensor  # [out, groups]
    bits: int
    group: int  # inputs of one scale; 0: the whole row
    zeros: Tensor | None = None
    minima: Tensor | None = None
    codebook: tuple[int, ...] | None = None
    order: Tensor | None = None  # permutation of the inputs


class LinearWeight(ABC):
    """[out, inputs] of float32, bfloat16 or float16, or codes; `bias` [out] or None; `order`: a permutation of inputs
    that comes before every cut, None where there is none."""

    order: Tensor | None = None

    def __init__(self, name: str, out: int, inputs: int, bias: Tensor | None) -> None:
        """name: in a checkpoint, for messages."""
        self.name = name
        self.out = out
        self.inputs = inputs
        self.bias = bias

    @abstractmethod
    def dense(self, dtype: torch.dtype) -> Tensor:
        """[out, inputs]. May be the checkpoint's mapped file: not to be written to."""

    def quantized(self) -> QuantizedWeight | None:
        """The codes, or None for a weight that is not quantized."""
        return None

    def shard(self, axis: Axis, ranges: Sequence[Range]) -> "LinearWeight":
        """The outputs or the inputs of some ranges, one behind the other; ranges may overlap those of another shard.

        Of shards along "in" each has the whole bias, which is to be added once.
        """
        return _Shard(self, axis, ranges)

    def reordered(self, order: Sequence[int]) -> "LinearWeight":
        """Output number i is what is number order[i] here. The weight itself where nothing moves."""
        return self if list(order) == list(range(self.out)) else _Reordered(self, order)


class StoredWeight(LinearWeight):
    """One tensor."""

    def __init__(
        self, name: str, out: int, inputs: int, bias: Tensor | None, read: Callable[[], Tensor]
    ) -> None:
        """read: gives the tensor [out, inputs], each time it is called."""
        super().__init__(name, out, inputs, bias)
        self._read = read

    def dense(self, dtype: torch.dtype) -> Tensor:
        """See `LinearWeight.dense`."""
        return self._read().to(dtype)


class StackedWeight(LinearWeight):
    """Several weights of the same inputs as one, their outputs one below the other."""

    def __init__(self, parts: Sequence[LinearWeight]) -> None:
        """parts: all with a bias, or all without."""
        biases = [part.bias for part in parts if part.bias is not None]
        assert len(biases) in (0, len(parts))
        out = sum(part.out for part in parts)
        name = " + ".join(part.name for part in parts)
        super().__init__(name, out, parts[0].inputs, torch.cat(biases) if biases else None)
        self._parts = parts

    def dense(self, dtype: torch.dtype) -> Tensor:
        """See `LinearWeight.dense`: memory of its own, filled part by part."""
        whole = torch.empty((self.out, self.inputs), dtype=dtype)
        first = 0
        for part in self._parts:
            whole[first : first + part.out] = part.dense(dtype)
            first += part.out
        return whole


class _Shard(LinearWeight):
    def __init__(self, whole: LinearWeight, axis: Axis, ranges: Sequence[Range]) -> None:
        size = sum(last - first for first, last in ranges)
        sizes = (size, whole.inputs) if axis == "out" else (whole.out, size)
        bias = whole.bias
        if axis == "out" and bias is not None:
            bias = _pieces(bias, 0, ranges)
        super().__init__(whole.name, *sizes, bias)
        self._whole, self._axis, self._ranges = whole, 0 if axis == "out" else 1, ranges

    def dense(self, dtype: torch.dtype) -> Tensor:
        return _pieces(self._whole.dense(dtype), self._axis, self._ranges)


class _Reordered(LinearWeight):
    def __init__(self, whole: LinearWeight, order: Sequence[int]) -> None:
        self._whole, self._order = whole, torch.tensor(order)
        bias = None if whole.bias is None else whole.bias[self._order]
        super().__init__(whole.name, len(order), whole.inputs, bias)

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self._whole.dense(dtype)[self._order]


def in_memory(weight: Tensor, bias: Tensor | None = None, name: str = "a tensor") -> LinearWeight:
    """Of a tensor [out, inputs] that is there already."""
    return StoredWeight(name, weight.shape[0], weight.shape[1], bias, lambda: weight)


def _pieces(tensor: Tensor, axis: int, ranges: Sequence[Range]) -> Tensor:
    return torch.cat([tensor.narrow(axis, first, last - first) for first, last in ranges], axis)
