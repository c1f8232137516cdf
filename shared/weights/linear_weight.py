"""A linear layer's weight between a checkpoint and `ops.pack`: read when it is asked for, in the form then wanted."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from shared.checkpoint.mapped_pages import give_back_freed
from shared.errors import InvalidRequest
from shared.weights.quantized_weight import (
    NotAsCodes,
    Numbers,
    QuantizedWeight,
)
from shared.weights.stacked_codes import require_alike, stacked

Axis = Literal["out", "in"]
Range = tuple[int, int]  # [first, last)
# Numbers of outputs or inputs, in any order; None: all of them, in theirs.
Places: TypeAlias = "Numbers | None"
Codes: TypeAlias = Callable[[Places], QuantizedWeight]  # of some outputs

_MADE = 1 << 20  # numbers that are made of codes together
_MIXED = "of layers that are computed as one some are quantized and some are not"


class LinearWeight(ABC):
    """[out, inputs] of float32, bfloat16 or float16, or codes; `bias` [out] or None."""

    def __init__(self, name: str, out: int, inputs: int, bias: Tensor | None) -> None:
        """name: in a checkpoint, for messages."""
        self.name = name
        self.out = out
        self.inputs = inputs
        self.bias = bias

    def dense(self, dtype: torch.dtype) -> Tensor:
        """[out, inputs]. May be the checkpoint's mapped file: not to be written to."""
        return self.select(None, None, dtype)

    @abstractmethod
    def select(self, rows: Places, columns: Places, dtype: torch.dtype) -> Tensor:
        """[rows, columns]: the weights of some outputs and inputs, in their order. No others are read."""

    def quantized(self) -> QuantizedWeight | None:
        """The codes, or None for a weight that is not quantized. Whatever was cut, stacked, reordered or spread is
        so in the codes too: dequantized they are `dense`, bit for bit. They are read each time it is called.

        Raises InvalidRequest where codes cannot express that, such as a cut inside a group of inputs with one scale.
        """
        read = self.codes()
        return None if read is None else read(None)

    def codes(self) -> Codes | None:
        """What gives `quantized` of some outputs, in their order, each time it is called; None for a weight that is not
        quantized. It raises as `quantized` does, also where what is read is not as what was read before."""
        if not self.is_coded:
            return None
        known: QuantizedWeight | None = None

        def read(rows: Places) -> QuantizedWeight:
            nonlocal known
            try:
                found = self.select_quantized(rows, None)
                if found is None:
                    raise NotAsCodes(_MIXED)
                require_alike(known or found, found)
            except NotAsCodes as error:
                raise _refusal(self, str(error)) from None
            known = known or found.outputs_between(slice(0, 0))
            return found

        return read

    @property
    @abstractmethod
    def is_coded(self) -> bool:
        """Whether it is quantized, or a part of it is."""

    @abstractmethod
    def select_quantized(self, rows: Places, columns: Places) -> QuantizedWeight | None:
        """`select` of the codes, None as of `quantized`. Raises NotAsCodes where codes cannot express it."""

    def shard(self, axis: Axis, ranges: Sequence[Range]) -> "LinearWeight":
        """The outputs or the inputs of some ranges, one behind the other; ranges may overlap those of another shard.
        Nothing else is read of the checkpoint.

        Of shards along "in" each has the whole bias, which is to be added once.
        """
        return _Shard(self, axis, ranges)

    def reordered(self, order: Sequence[int]) -> "LinearWeight":
        """Output number i is what is number order[i] here. The weight itself where nothing moves."""
        return self if list(order) == list(range(self.out)) else _Reordered(self, order)

    def spread(self, axis: Axis, places: Sequence[int], count: int) -> "LinearWeight":
        """With `count` outputs or inputs: number i of those here is number places[i], the others are zeros. The weight
        itself where there are no others."""
        return self if list(places) == list(range(count)) else _Spread(self, axis, places, count)

    def scaled(self, factors: Tensor) -> "LinearWeight":
        """Each output times its factor [out], its bias too, in the factors' type."""
        return _Scaled(self, factors)


class StoredWeight(LinearWeight):
    """One tensor."""

    def __init__(
        self,
        name: str,
        out: int,
        inputs: int,
        bias: Tensor | None,
        read: Callable[[slice, slice], Tensor],
    ) -> None:
        """read: gives a part of the tensor [out, inputs], by its rows and its columns, each time it is called."""
        super().__init__(name, out, inputs, bias)
        self._read = read

    @property
    def is_coded(self) -> bool:
        """Never."""
        return False

    def select(self, rows: Places, columns: Places, dtype: torch.dtype) -> Tensor:
        """See `LinearWeight.select`."""
        row_runs, row_order = _runs(rows, self.out)
        column_runs, column_order = _runs(columns, self.inputs)
        lines = [_join([self._read(r, c) for c in column_runs], 1) for r in row_runs]
        found = _join(lines, 0)
        if row_order is not None:
            found = found[row_order]
        return (found if column_order is None else found[:, column_order]).to(dtype)

    def select_quantized(self, rows: Places, columns: Places) -> None:
        """None."""


class CodedWeight(LinearWeight):
    """One weight as codes."""

    def __init__(
        self,
        name: str,
        out: int,
        inputs: int,
        bias: Tensor | None,
        read: Callable[[slice], QuantizedWeight],
    ) -> None:
        """read: gives some outputs that follow each other, each time it is called."""
        super().__init__(name, out, inputs, bias)
        self._read = read
        self._none: QuantizedWeight | None = None

    @property
    def is_coded(self) -> bool:
        """Always."""
        return True

    def select(self, rows: Places, columns: Places, dtype: torch.dtype) -> Tensor:
        """See `LinearWeight.select`."""
        found = self._rows(rows).dequantize(dtype)
        return found if columns is None else found[:, columns]

    def select_quantized(self, rows: Places, columns: Places) -> QuantizedWeight:
        """See `LinearWeight.select_quantized`."""
        found = self._rows(rows)
        return found if columns is None else found.select_inputs(columns)

    def _rows(self, rows: Places) -> QuantizedWeight:
        if rows is not None and len(rows) == 0:
            # Read once: a row of some formats lies in all pages of the tensor.
            if self._none is None:
                self._none = self._read(slice(0, 1)).outputs_between(slice(0, 0))
            return self._none
        runs, order = _runs(rows, self.out)
        found = stacked([self._read(run) for run in runs])
        return found if order is None else found.outputs(order.numpy())


class NearlyCodedWeight(CodedWeight):
    """One weight as codes that are not quite its numbers, which it still has for those who want no codes."""

    def __init__(self, numbers: LinearWeight, read: Callable[[slice], QuantizedWeight]) -> None:
        """read: as of `CodedWeight`."""
        super().__init__(numbers.name, numbers.out, numbers.inputs, numbers.bias, read)
        self._numbers = numbers

    def select(self, rows: Places, columns: Places, dtype: torch.dtype) -> Tensor:
        """See `LinearWeight.select`."""
        return self._numbers.select(rows, columns, dtype)


class StackedWeight(LinearWeight):
    """Several weights of the same inputs as one, their outputs one below the other."""

    def __init__(self, parts: Sequence[LinearWeight]) -> None:
        """parts: where some have a bias, which codes of some layers bring with them, that of others is zero."""
        biases = [part.bias for part in parts]
        if has_bias := any(bias is not None for bias in biases):
            whole = [
                torch.zeros(part.out) if bias is None else bias
                for part, bias in zip(parts, biases, strict=True)
            ]
        out = sum(part.out for part in parts)
        name = " + ".join(part.name for part in parts)
        super().__init__(name, out, parts[0].inputs, torch.cat(whole) if has_bias else None)
        self._parts = parts

    @property
    def is_coded(self) -> bool:
        """Where any of the parts is."""
        return any(part.is_coded for part in self._parts)

    def select(self, rows: Places, columns: Places, dtype: torch.dtype) -> Tensor:
        """See `LinearWeight.select`: memory of its own, filled part by part."""
        sizes = [
            len(places) if places is not None else count
            for places, count in ((rows, self.out), (columns, self.inputs))
        ]
        found = torch.empty(sizes, dtype=dtype)
        first = 0
        for part in self._parts:
            last = first + part.out
            if rows is None:
                found[first:last] = part.select(None, columns, dtype)
            else:
                mine = np.flatnonzero((rows >= first) & (rows < last))
                if len(mine):
                    found[mine] = part.select(rows[mine] - first, columns, dtype)
            first = last
        return found

    def select_quantized(self, rows: Places, columns: Places) -> QuantizedWeight | None:
        """See `LinearWeight.select_quantized`. All parts are quantized in the same way, or none is."""
        found: list[QuantizedWeight | None] = []
        at: list[Numbers] = []
        first = 0
        for part in self._parts:
            mine = None
            if rows is not None:
                places = np.flatnonzero((rows >= first) & (rows < first + part.out))
                mine = rows[places] - first
                at.append(places)
            # Of a part without such rows none: its form is one that all have.
            found.append(part.select_quantized(mine, columns))
            first += part.out
        codes = [part for part in found if part is not None]
        if not codes:
            return None
        if len(codes) < len(found):
            raise NotAsCodes(_MIXED)
        whole = stacked(codes)
        return whole if rows is None else whole.outputs(np.argsort(np.concatenate(at)))


class _Changed(LinearWeight):
    """Of another weight, which is quantized where that is."""

    _whole: LinearWeight

    @property
    def is_coded(self) -> bool:
        return self._whole.is_coded


class _Shard(_Changed):
    def __init__(self, whole: LinearWeight, axis: Axis, ranges: Sequence[Range]) -> None:
        places = np.concatenate([np.arange(first, last) for first, last in ranges])
        bias = whole.bias
        if axis == "out":
            bias = None if bias is None else bias[places]
            super().__init__(whole.name, len(places), whole.inputs, bias)
        else:
            super().__init__(whole.name, whole.out, len(places), bias)
        self._whole, self._axis, self._places = whole, axis, places

    def select(self, rows: Places, columns: Places, dtype: torch.dtype) -> Tensor:
        if self._axis == "out":
            return self._whole.select(_of(self._places, rows), columns, dtype)
        return self._whole.select(rows, _of(self._places, columns), dtype)

    def select_quantized(self, rows: Places, columns: Places) -> QuantizedWeight | None:
        if self._axis == "out":
            return self._whole.select_quantized(_of(self._places, rows), columns)
        return self._whole.select_quantized(rows, _of(self._places, columns))


class _Reordered(_Changed):
    def __init__(self, whole: LinearWeight, order: Sequence[int]) -> None:
        self._whole, self._places = whole, np.asarray(order, np.int64)
        bias = None if whole.bias is None else whole.bias[self._places]
        super().__init__(whole.name, len(order), whole.inputs, bias)

    def select(self, rows: Places, columns: Places, dtype: torch.dtype) -> Tensor:
        return self._whole.select(_of(self._places, rows), columns, dtype)

    def select_quantized(self, rows: Places, columns: Places) -> QuantizedWeight | None:
        return self._whole.select_quantized(_of(self._places, rows), columns)


class _Spread(_Changed):
    def __init__(self, whole: LinearWeight, axis: Axis, places: Sequence[int], count: int) -> None:
        self._whole, self._axis = whole, axis
        # Which of the outputs or inputs each is; -1: zeros.
        self._sources = np.full((count,), -1, np.int64)
        self._sources[list(places)] = np.arange(len(places))
        bias = whole.bias
        if axis == "in":
            super().__init__(whole.name, whole.out, count, bias)
            return
        if bias is not None:
            bias = bias.new_zeros(count).index_copy(0, torch.tensor(places), bias)
        super().__init__(whole.name, count, whole.inputs, bias)

    def select(self, rows: Places, columns: Places, dtype: torch.dtype) -> Tensor:
        out = self._axis == "out"
        sources = _of(self._sources, rows if out else columns)
        stored = np.flatnonzero(sources >= 0)
        mine = sources[stored]
        found = self._whole.select(mine if out else rows, columns if out else mine, dtype)
        shape = (len(sources), found.shape[1]) if out else (len(found), len(sources))
        at = torch.from_numpy(stored)
        return found.new_zeros(shape).index_copy_(0 if out else 1, at, found)

    def select_quantized(self, rows: Places, columns: Places) -> QuantizedWeight | None:
        out = self._axis == "out"
        sources = _of(self._sources, rows if out else columns)
        mine = sources[sources >= 0]
        found = self._whole.select_quantized(mine if out else rows, columns if out else mine)
        if found is None:
            return None
        spread = np.full(len(sources), -1, np.int64)
        spread[sources >= 0] = np.arange(len(mine))
        return found.outputs(spread) if out else found.select_inputs(spread)


class _Numbers(LinearWeight):
    def __init__(self, whole: LinearWeight) -> None:
        super().__init__(whole.name, whole.out, whole.inputs, whole.bias)
        self._whole = whole

    @property
    def is_coded(self) -> bool:
        return False

    def select(self, rows: Places, columns: Places, dtype: torch.dtype) -> Tensor:
        """A few outputs at a time: what they are made of is several times as large."""
        places = np.arange(self.out) if rows is None else rows
        width = self.inputs if columns is None else len(columns)
        found = torch.empty((len(places), width), dtype=dtype)
        step = max(1, _MADE // max(1, self.inputs))
        for first in range(0, len(places), step):
            some = places[first : first + step]
            found[first : first + step] = self._whole.select(some, columns, torch.float32)
        give_back_freed()
        return found

    def select_quantized(self, rows: Places, columns: Places) -> None:
        pass


class _Scaled(_Changed):
    def __init__(self, whole: LinearWeight, factors: Tensor) -> None:
        self._whole, self._factors = whole, factors
        bias = None if whole.bias is None else whole.bias.to(factors.dtype) * factors
        super().__init__(whole.name, whole.out, whole.inputs, bias)

    def select(self, rows: Places, columns: Places, dtype: torch.dtype) -> Tensor:
        codes = self.select_quantized(rows, None)
        if codes is not None:
            found = codes.dequantize(dtype)
            return found if columns is None else found[:, columns]
        found = self._whole.select(rows, columns, dtype)
        return found * self._of(rows).to(dtype)[:, None]

    def select_quantized(self, rows: Places, columns: Places) -> QuantizedWeight | None:
        found = self._whole.select_quantized(rows, columns)
        return found and found.scaled(self._of(rows))

    def _of(self, rows: Places) -> Tensor:
        return self._factors if rows is None else self._factors[rows]


def in_memory(weight: Tensor, bias: Tensor | None = None, name: str = "a tensor") -> LinearWeight:
    """Of a tensor [out, inputs] that is there already."""
    out, inputs = weight.shape
    return StoredWeight(name, out, inputs, bias, lambda rows, columns: weight[rows, columns])


def as_numbers(weight: LinearWeight) -> LinearWeight:
    """The numbers of a weight alone, whatever it is stored as: of codes those of the outputs that are asked for, each
    time that they are."""
    return _Numbers(weight) if weight.is_coded else weight


def as_codes(
    weight: QuantizedWeight, bias: Tensor | None = None, name: str = "a tensor"
) -> LinearWeight:
    """Of codes that are there already."""
    return CodedWeight(name, len(weight.codes), weight.inputs, bias, weight.outputs_between)


def _refusal(weight: LinearWeight, why: str) -> InvalidRequest:
    return InvalidRequest(
        "UNSUPPORTED_WEIGHTS",
        f"{weight.name} [{weight.out} outputs, {weight.inputs} inputs] cannot be used quantized: {why}",
        field="model",
    )


def _of(places: Numbers, some: Places) -> Numbers:
    return places if some is None else places[some]


def _join(pieces: Sequence[Tensor], axis: int) -> Tensor:
    """As they are where there is one."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), axis)


def _runs(places: Places, count: int) -> tuple[list[slice], Tensor | None]:
    """The places of `count` that are to be read, ascending and in as few runs as they lie in, and which of them each
    place is; None where they lie as they are asked for."""
    if places is None:
        return [slice(0, count)], None
    sought = np.unique(places)
    ends = np.flatnonzero(np.diff(sought, append=count + 1) > 1)
    starts = [0, *(ends[:-1] + 1).tolist()]
    runs = [
        slice(int(sought[first]), int(sought[last]) + 1)
        for first, last in zip(starts, ends.tolist(), strict=True)
    ]
    if np.array_equal(sought, places):
        return runs, None
    return runs, torch.from_numpy(np.searchsorted(sought, places))
