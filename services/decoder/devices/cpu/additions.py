"""Low-rank additions to linear layers as the kernels get them: `cpu_kernels/source/linear/segments.h`."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from services.decoder.devices.base.adapters import (
    Addition,
    LayerAdditions,
    LayerSegments,
    LinearPlace,
    Segment,
)
from services.decoder.steps.attention_meta import Packed
from shared.cpu_kernels import binding
from shared.cpu_kernels.host_memory import zeros_in_huge_pages

_BOTH, _LEFT, _RIGHT = 0, 1, 2
_FIELDS = ("down", "up", "rank", "inputs", "first", "last", "side")
_RANKS = 4  # as many as `RANKS_EACH` in `segment_inputs.h`
_LINE = 64  # numbers: no fewer than a cache line has
_RECORD = np.dtype([(name, np.int64) for name in _FIELDS])

Records: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.void]]"
Longs: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"


@dataclass(frozen=True)
class CpuAddition(Addition):
    """`records`: what the kernels get, one, or two of an addition to gates and to what they gate; they point to `down`
    as `_ranks` has it and to `vectors`, the outputs of `up` as vectors [vectors, units, lanes, ranks of a unit]: `up`
    is the first part of them. For `AddedInSteps` alone: `BaseOps.adapt` does not read them."""

    records: Records
    vectors: Sequence[Tensor]


class Memory:
    """Matrices side by side in huge pages. One is too small for pages of its own, and between small pages no processor
    reads ahead. A chunk is given back with its last matrix."""

    _CHUNK = 8 << 20

    def __init__(self, dtype: torch.dtype) -> None:
        self._free = torch.empty(0, dtype=dtype)

    def copy(self, matrix: Tensor) -> Tensor:
        """Contiguous, from the beginning of a cache line."""
        count = -(-matrix.numel() // _LINE) * _LINE
        if count > len(self._free):
            least = self._CHUNK // matrix.element_size()
            self._free = zeros_in_huge_pages((max(count, least),), self._free.dtype, touch=False)
        taken, self._free = self._free[: matrix.numel()], self._free[count:]
        return taken.view(matrix.shape).copy_(matrix)


def pack(place: LinearPlace, down: Tensor, up: Tensor, lanes: int, memory: Memory) -> CpuAddition:
    """down [rank, inputs], up [outputs, rank]; lanes: numbers in a vector of the kernels."""
    rank, inputs = down.shape
    down = memory.copy(_ranks(down, lanes))
    found: list[tuple[int, Tensor, int, int]] = []  # side, vectors, first and last of them
    if not place.gates:
        found.append((_BOTH, *_vectors(up, place.first, lanes, memory)))
    else:
        middle = min(max(place.gates - place.first, 0), len(up))
        if middle:
            found.append((_LEFT, *_vectors(up[:middle], place.first, lanes, memory)))
        if middle < len(up):
            first = place.first + middle - place.gates
            found.append((_RIGHT, *_vectors(up[middle:], first, lanes, memory)))
    records = np.array(
        [
            (down.data_ptr(), vectors.data_ptr(), rank, inputs, first, last, side)
            for side, vectors, first, last in found
        ],
        _RECORD,
    )
    vectors = tuple(one[1] for one in found)
    return CpuAddition(place, Packed(down, None), Packed(vectors[0], None), records, vectors)


def _ranks(down: Tensor, lanes: int) -> Tensor:
    """Inputs of four ranks side by side: for each four, or what is left of them, vectors [vectors of inputs, units,
    lanes, ranks of a unit], the last ones filled up with zeros; flat, one four after the other."""
    whole = torch.nn.functional.pad(down, (0, -down.shape[1] % lanes))
    fours = whole.view(len(whole), -1, lanes).split(_RANKS)
    return torch.cat([_units(four.transpose(0, 1)).flatten() for four in fours])


def _vectors(up: Tensor, first: int, lanes: int, memory: Memory) -> tuple[Tensor, int, int]:
    """Outputs [n, rank], of which the first is number `first`, as vectors [m, units, lanes, ranks of a unit], zero
    beside them, and which vectors these are, [first, last)."""
    begin, end = first // lanes, -(-(first + len(up)) // lanes)
    rows = up.new_zeros((end - begin) * lanes, up.shape[1])
    rows[first - begin * lanes :][: len(up)] = up
    return memory.copy(_units(rows.view(end - begin, lanes, -1).transpose(1, 2))), begin, end


def _units(vectors: Tensor) -> Tensor:
    """Vectors [n, ranks, lanes] with as many ranks beside each other as four bytes have numbers: [n, units, lanes,
    ranks of a unit], the last unit filled up with zeros."""
    each = 4 // vectors.element_size()
    whole = torch.nn.functional.pad(vectors, (0, 0, 0, -vectors.shape[1] % each))
    count, ranks, lanes = whole.shape
    return whole.view(count, ranks // each, each, lanes).transpose(2, 3)


class _Adapter:
    """`call`: what the kernels get of an adapter's additions, which it points to, by product; see `binding.Adapter`."""

    def __init__(self, **additions: Sequence[Addition]) -> None:
        self._records = {
            name: np.concatenate(_records(some)) for name, some in additions.items() if some
        }
        self.call = binding.Adapter()
        for name, records in self._records.items():
            setattr(self.call, name, records.ctypes.data)
            setattr(self.call, f"{name}_count", len(records))
        self.address = ctypes.addressof(self.call)


@dataclass(frozen=True)
class Added:
    """What the kernels get of a step's segments, and the addresses of what they get of each one's adapter; both point
    into `kept`."""

    segments: binding.Segments
    addresses: Any
    kept: Sequence[object]


class AddedInSteps:
    """Makes it."""

    def __init__(self) -> None:
        self._adapters: WeakKeyDictionary[LayerAdditions, _Adapter] = WeakKeyDictionary()
        # Models keep what the last steps had.
        self._layers: WeakKeyDictionary[LayerSegments, Added] = WeakKeyDictionary()
        self._rows: tuple[int, Sequence[Tensor], _Rows] | None = None

    def to_layer(self, segments: LayerSegments, count: int) -> Added:
        """In a step of `count` rows."""
        known = self._layers.get(segments)
        if known is None or known.segments.rows != count:
            adapters = [self._adapter(one) for one in segments.additions]
            known = self._layers[segments] = self._added(segments.rows, adapters, count)
        return known

    def to_product(self, segments: Sequence[Segment], count: int) -> Added:
        """To one product alone: the first that each `_Adapter` has."""
        adapters = [_Adapter(qkv=[segment.addition]) for segment in segments]
        return self._added([segment.rows for segment in segments], adapters, count)

    def _added(self, rows: Sequence[Tensor], adapters: Sequence[_Adapter], count: int) -> Added:
        addresses = (ctypes.c_void_p * len(adapters))(*(one.address for one in adapters))
        of_rows = self._rows_of(rows, count)
        return Added(of_rows.call, addresses, (of_rows, *adapters))

    def _adapter(self, additions: LayerAdditions) -> _Adapter:
        known = self._adapters.get(additions)
        if known is None:
            known = self._adapters[additions] = _Adapter(
                qkv=additions.qkv,
                output=additions.output,
                gate_up=additions.gate_up,
                down=additions.down,
            )
        return known

    def _rows_of(self, members: Sequence[Tensor], count: int) -> "_Rows":
        known = self._rows
        if known is None or known[0] != count or not _are_same(known[1], members):
            known = self._rows = count, members, _Rows(members, count)
        return known[2]


class _Rows:
    """`binding.Segments` of a step of `count` rows, whose segments have the rows `members`."""

    def __init__(self, members: Sequence[Tensor], count: int) -> None:
        of_segments = [rows.numpy() for rows in members]
        starts: Longs = np.cumsum([0, *map(len, of_segments)], dtype=np.int64)
        self._kept = (starts, np.concatenate(of_segments))
        self.call = binding.Segments(
            count, len(members), *(array.ctypes.data for array in self._kept)
        )


def _records(additions: Sequence[Addition]) -> Sequence[Records]:
    own = [addition for addition in additions if isinstance(addition, CpuAddition)]
    assert len(own) == len(additions)
    return [addition.records for addition in own]


def _are_same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether they are the same tensors, which nobody changes."""
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
