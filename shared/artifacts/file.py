"""The file of one artifact: a page of header, then the bytes of one row-major tensor. Written once, never changed.

0     8s  magic "TESSERA\\x01"
8    16s  nonce of the producer: proves that the file is the one its location names
24   16s  digest
40   16s  dtype, ASCII, padded with zeros
56    u64 payload bytes
64    u64 number of dimensions (at most 8)
72  8*u64 shape, padded with zeros
4096      payload, page-aligned so that it can be handed to a device or a kernel as it is
"""

import mmap
import os
import stat
import struct
from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

HEADER_BYTES = 4096
NONCE_BYTES = 16
DIGEST_BYTES = 16

_MAGIC = b"TESSERA\x01"
_LAYOUT = struct.Struct("<8s16s16s16sQQ8Q")
_MAX_DIMENSIONS = 8
_WRITTEN = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
# What numpy calls the elements; bfloat16, which it does not know, travels as its 16 bits.
_STORED_AS = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "uint16",
    "uint8": "uint8",
    "int8": "int8",
    "int32": "int32",
    "int64": "int64",
}

Array = npt.NDArray[np.generic]


class TornFile(Exception):
    """The file is not the artifact that was asked for."""


def numpy_dtype(dtype: str) -> np.dtype[np.generic]:
    """The numpy type in which elements of `dtype` are handed out. Raises TornFile if there is none."""
    try:
        return np.dtype(_STORED_AS[dtype])
    except KeyError:
        raise TornFile(f"unknown element type {dtype!r}") from None


def check_size(dtype: str, shape: Sequence[int], size_bytes: int) -> None:
    """Raises TornFile unless dtype, shape and size fit together."""
    if len(shape) > _MAX_DIMENSIONS or any(side < 0 for side in shape):
        raise TornFile(f"bad shape {list(shape)}")
    expected = prod(shape) * numpy_dtype(dtype).itemsize
    if expected != size_bytes:
        raise TornFile(f"{list(shape)} of {dtype} is {expected} bytes, not {size_bytes}")


def header(nonce: bytes, digest: bytes, dtype: str, shape: Sequence[int], size_bytes: int) -> bytes:
    """The first page of the file."""
    check_size(dtype, shape, size_bytes)
    sides = [*shape, *[0] * (_MAX_DIMENSIONS - len(shape))]
    fields = (_MAGIC, nonce, digest, dtype.encode(), size_bytes, len(shape), *sides)
    return _LAYOUT.pack(*fields).ljust(HEADER_BYTES, b"\0")


def write(
    path: Path, nonce: bytes, digest: bytes, array: Array, dtype: str | None = None
) -> tuple[str, tuple[int, ...]]:
    """Writes a new file; `dtype` names the elements when numpy cannot ("bfloat16" for uint16 bits).

    Returns dtype and shape. Raises OSError (ENOSPC when shared memory is full) and leaves nothing
    behind then.
    """
    descriptor = create(path)
    try:
        return write_to(descriptor, nonce, digest, array, dtype)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def create(path: Path) -> int:
    """A new file, open for writing, of which `write_to` makes an artifact; maybe in another process."""
    return os.open(path, _WRITTEN | os.O_CREAT | os.O_EXCL, 0o600)


def fill(path: Path, nonce: bytes, digest: bytes, array: Array, dtype: str | None = None) -> None:
    """`write` into a file that is there, maybe with its memory allocated: it gets the artifact's size."""
    descriptor = os.open(path, _WRITTEN | os.O_CREAT, 0o600)
    try:
        write_to(descriptor, nonce, digest, array, dtype)
        os.ftruncate(descriptor, HEADER_BYTES + array.nbytes)
    finally:
        os.close(descriptor)


def write_to(
    descriptor: int, nonce: bytes, digest: bytes, array: Array, dtype: str | None = None
) -> tuple[str, tuple[int, ...]]:
    """`write` for a file that `create` has made: it calls the system for nothing but to write."""
    array = np.ascontiguousarray(array)
    dtype = dtype or str(array.dtype)
    if numpy_dtype(dtype) != array.dtype:
        raise TornFile(f"{array.dtype} elements cannot be called {dtype}")
    head = header(nonce, digest, dtype, array.shape, array.nbytes)
    for part in (memoryview(head), array.reshape(-1).view(np.uint8).data):
        while part.nbytes:
            part = part[os.write(descriptor, part) :]
    return dtype, array.shape


def read_header(path: Path, nonce: bytes, digest: bytes) -> tuple[str, tuple[int, ...]]:
    """Dtype and shape of a file that another process wrote for us. Raises TornFile, FileNotFoundError."""
    descriptor = _open_regular(path)
    try:
        dtype, shape, _ = _parse(descriptor, nonce, digest)
    finally:
        os.close(descriptor)
    return dtype, shape


def map_payload(path: Path, nonce: bytes, digest: bytes, dtype: str, shape: Sequence[int]) -> Array:
    """Maps the payload read-only. The mapping stays valid when the file is unlinked.

    The path may come from the wire: only a regular file is opened, no link is followed, and header
    and size must be exactly what the caller expects. Raises TornFile, or OSError where the file
    cannot be opened.
    """
    descriptor = _open_regular(path)
    try:
        found_dtype, found_shape, size = _parse(descriptor, nonce, digest)
        if (found_dtype, found_shape) != (dtype, tuple(shape)):
            raise TornFile(f"the file holds {found_shape} of {found_dtype}")
        if size == 0:
            return np.empty(found_shape, numpy_dtype(dtype))
        mapping = mmap.mmap(descriptor, HEADER_BYTES + size, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)
    flat: Array = np.frombuffer(mapping, numpy_dtype(dtype), offset=HEADER_BYTES)
    return flat.reshape(found_shape)


def _open_regular(path: Path) -> int:
    # Looked at before opening as well: opening a device or a pipe can have effects of its own.
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise TornFile("not a regular file")
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise TornFile("not a regular file")
    return descriptor


def _parse(descriptor: int, nonce: bytes, digest: bytes) -> tuple[str, tuple[int, ...], int]:
    page = os.pread(descriptor, HEADER_BYTES, 0)
    if len(page) < HEADER_BYTES:
        raise TornFile("shorter than its header")
    magic, found_nonce, found_digest, name, size, dimensions, *sides = _LAYOUT.unpack_from(page)
    if magic != _MAGIC or found_nonce != nonce or found_digest != digest:
        raise TornFile("another artifact, or another producer")
    if dimensions > _MAX_DIMENSIONS:
        raise TornFile("too many dimensions")
    dtype, shape = name.rstrip(b"\0").decode("ascii", "replace"), tuple(sides[:dimensions])
    check_size(dtype, shape, size)
    if os.fstat(descriptor).st_size != HEADER_BYTES + size:
        raise TornFile("cut off")
    return dtype, shape, size
