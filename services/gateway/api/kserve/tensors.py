"""Tensors of the protocol, in JSON and as bytes: little-endian numbers, and strings behind their lengths."""

import struct
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np

from services.gateway.decoding.bounds import at_most, wrong
from shared.errors import InvalidRequest

BYTES = "BYTES"
_DTYPES = {
    "BOOL": "?",
    "INT8": "<i1", "INT16": "<i2", "INT32": "<i4", "INT64": "<i8",
    "UINT8": "<u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8",
    "FP16": "<f2", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip
_LENGTH = struct.Struct("<I")
_MOST_DIMENSIONS = 8


class Tensor(NamedTuple):
    """A tensor with its values in order: bytes, booleans or numbers."""

    name: str
    datatype: str
    shape: Sequence[int]
    values: Sequence[Any]

    @property
    def is_ids(self) -> bool:
        """Whether its values are whole numbers."""
        return "INT" in self.datatype


def from_json(name: str, datatype: str, shape: Sequence[int], data: msgspec.Raw) -> Tensor:
    """A tensor whose values stand in JSON, nested as its shape is or flat. Raises InvalidRequest naming it."""
    field = _field(name)
    _check(field, datatype, shape)
    raw = bytes(data)
    if not raw:
        raise wrong(field, "has no data")
    try:
        found = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise wrong(f"{field}.data", "is not valid JSON") from None
    values = _flat(found if isinstance(found, list) else [found])
    if datatype == BYTES:
        if not all(isinstance(value, str) for value in values):
            raise wrong(f"{field}.data", "must hold strings")
        values = [value.encode() for value in values]
    else:
        kinds = (bool,) if datatype == "BOOL" else (int,) if "INT" in datatype else (int, float)
        if not {*map(type, values)} <= {*kinds}:
            raise wrong(f"{field}.data", f"must hold values of {datatype}")
    return _whole(Tensor(name, datatype, shape, values))


def from_values(name: str, datatype: str, shape: Sequence[int], values: Sequence[Any]) -> Tensor:
    """A tensor whose values are of its datatype already. Raises InvalidRequest naming it."""
    _check(_field(name), datatype, shape)
    return _whole(Tensor(name, datatype, shape, values))


def from_bytes(name: str, datatype: str, shape: Sequence[int], data: bytes) -> Tensor:
    """A tensor whose values came as bytes. Raises InvalidRequest naming it."""
    field = _field(name)
    _check(field, datatype, shape)
    if datatype == BYTES:
        return _whole(Tensor(name, datatype, shape, _strings(field, data, prod(shape))))
    kind = np.dtype(_DTYPES[datatype])
    if len(data) != kind.itemsize * prod(shape):
        raise wrong(
            field, f"has {len(data)} bytes, not the {kind.itemsize * prod(shape)} of its shape"
        )
    return Tensor(name, datatype, shape, np.frombuffer(data, kind).tolist())


def to_bytes(tensor: Tensor) -> bytes:
    """Its values as bytes."""
    if tensor.datatype == BYTES:
        return b"".join(_LENGTH.pack(len(value)) + value for value in tensor.values)
    return np.asarray(tensor.values, _DTYPES[tensor.datatype]).tobytes()


def _field(name: str) -> str:
    return f"inputs.{name[:64]}"


def _check(field: str, datatype: str, shape: Sequence[int]) -> None:
    if datatype != BYTES and datatype not in _DTYPES:
        names = ", ".join((BYTES, *_DTYPES))
        raise wrong(field, f"has the datatype {datatype[:16]!r}: it must be one of {names}")
    at_most(f"{field}.shape", len(shape), _MOST_DIMENSIONS)
    if not all(0 <= size < 1 << 31 for size in shape):
        raise wrong(f"{field}.shape", "must hold sizes of 0 and more")


def _whole(tensor: Tensor) -> Tensor:
    count = prod(tensor.shape)
    if len(tensor.values) != count:
        raise wrong(
            _field(tensor.name), f"has {len(tensor.values)} values, not the {count} of its shape"
        )
    return tensor


def _flat(values: Sequence[Any]) -> list[Any]:
    if not any(isinstance(value, list) for value in values):
        return list(values)
    flat: list[Any] = []
    for value in values:
        flat += _flat(value) if isinstance(value, list) else [value]
    return flat


def _strings(field: str, data: bytes, most: int) -> list[bytes]:
    found: list[bytes] = []
    at = 0
    while at < len(data):
        if len(found) == most or at + _LENGTH.size > len(data):
            raise _broken(field)
        (size,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if at + size > len(data):
            raise _broken(field)
        found.append(data[at : at + size])
        at += size
    return found


def _broken(field: str) -> InvalidRequest:
    return wrong(
        field, "holds no strings behind their lengths of four bytes, as many as its shape has"
    )
