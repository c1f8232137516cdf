"""Tensors in blocks of POSIX shared memory, and their names and shapes as negative int64 among token ids, as MindIE-LLM
passes media to a model. Two ids stand for a tensor: the block's name, and the tensor's shape.

An id that is no valid code and a block that cannot be read are errors here; MindIE-LLM's reader goes on with
uninitialised memory.
"""

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.environment import random_hex
from shared.errors import InvalidRequest, Overloaded

Array = npt.NDArray[Any]

LARGEST_BLOCK = 10**9  # bytes
BLOCKS = Path("/dev/shm")  # where Linux has blocks of shared memory, as files
NAMES_FIELD = "shm_name_save_path"  # what requests call a list of blocks

_LARGEST_LIST = 64 << 10  # bytes
_NAME_BYTES = 4  # random ones, of the blocks that are written here
_PREFIX = "psm_"  # of the names that Python gives
_ALPHABET = "0123456789abcdefpsmnwABCDEF"
_LONGEST_NAME = 10  # characters behind the prefix
_FIRST_CHARACTER_BIT = 53
_CHARACTER_BITS = 5
_LENGTH_BIT = 58
_DIMS_BIT = 60
LARGEST_CODE = -(1 << _LENGTH_BIT)
# Bits of each dimension, by how many there are.
_WIDTHS = {
    1: (57,),
    2: (29, 28),
    3: (19, 19, 19),
    4: (18, 3, 18, 18),
    5: (13, 13, 3, 14, 14),
}


def is_code(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which ids can only be codes: those of a model's vocabulary, and its marks, are far above."""
    return ids <= LARGEST_CODE


def encode_name(name: str) -> int:
    """The id of a block "psm_" and up to ten characters. Raises InvalidRequest for another name."""
    body = name.removeprefix(_PREFIX)
    places = [_ALPHABET.find(character) for character in body]
    if not name.startswith(_PREFIX) or not 0 < len(body) <= _LONGEST_NAME or -1 in places:
        raise _bad(
            f"{name!r} is no name of a block: {_PREFIX} and up to {_LONGEST_NAME} of {_ALPHABET}"
        )
    value = len(body) << _LENGTH_BIT
    for index, place in enumerate(places):
        value |= place << (_FIRST_CHARACTER_BIT - _CHARACTER_BITS * index)
    return -(value | _name_check(places))


def decode_name(code: int) -> str:
    """The block that an id names. Raises InvalidRequest for an id that names none."""
    value = -code
    length = value >> _LENGTH_BIT
    if code >= 0 or not 0 < length <= _LONGEST_NAME:
        raise _bad(f"{code} is no code of a block's name")
    shifts = (_FIRST_CHARACTER_BIT - _CHARACTER_BITS * index for index in range(length))
    places = [value >> shift & 0x1F for shift in shifts]
    if max(places) < len(_ALPHABET):
        name = _PREFIX + "".join(_ALPHABET[place] for place in places)
        if encode_name(name) == code:
            return name
    raise _bad(f"{code} is no code of a block's name: its check digits differ")


def encode_shape(shape: Sequence[int]) -> int:
    """The id of a shape of one to five dimensions.

    Raises InvalidRequest for dimensions that have no room: the third last of four and of five is at most 4.
    """
    widths = _WIDTHS.get(len(shape))
    if widths is None:
        raise _bad(f"a shape of {len(shape)} dimensions; there may be 1 to 5")
    value = len(shape) << _DIMS_BIT
    for size, width, shift in zip(shape, widths, _shifts(widths), strict=True):
        if not 0 < size <= 1 << (width - 1):
            raise _bad(f"{tuple(shape)} has no code: {size} is not from 1 to {1 << (width - 1)}")
        value |= size << shift
    return -(value | value.bit_count() % 3)


def decode_shape(code: int) -> tuple[int, ...]:
    """The shape that an id stands for. Raises InvalidRequest for an id that stands for none."""
    value = -code
    widths = _WIDTHS.get(value >> _DIMS_BIT) if code < 0 else None
    if widths is None:
        raise _bad(f"{code} is no code of a shape")
    pairs = zip(widths, _shifts(widths), strict=True)
    shape = tuple(value >> shift & ((1 << width) - 1) for width, shift in pairs)
    with suppress(InvalidRequest):  # sizes that have no code
        if encode_shape(shape) == code:
            return shape
    raise _bad(f"{code} is no code of a shape: its check digits or sizes are wrong")


def write_block(array: Array, names: Path) -> str:
    """Copies an array to a new block and appends the block's name to the file `names`; returns the name.

    The block stays until `release_blocks`. Raises InvalidRequest for no byte, for more than LARGEST_BLOCK and for a
    list that cannot be written, Overloaded when shared memory is full.
    """
    if not 0 < array.nbytes <= LARGEST_BLOCK:
        raise _bad(f"{array.nbytes} bytes for a block; there may be 1 to {LARGEST_BLOCK}")
    name = _PREFIX + random_hex(_NAME_BYTES)
    path = BLOCKS / name
    try:
        # Written, not mapped: of a mapping, memory that lacks would end the process.
        with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as block:
            _write(block, memoryview(array.tobytes()))
            _append(names, name)
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
            raise Overloaded(
                "SHARED_MEMORY_FULL", f"shared memory is full: {error}", retry_after_s="5"
            ) from error
        raise
    return name


def read_block(name_code: int, shape_code: int, dtype: npt.DTypeLike) -> Array:
    """A copy of the array that two ids stand for.

    Raises InvalidRequest for bad ids, for a block that is gone or cannot be opened, and for one with less bytes.
    """
    name, shape = decode_name(name_code), decode_shape(shape_code)
    needed = prod(shape) * np.dtype(dtype).itemsize
    if needed > LARGEST_BLOCK:
        raise _bad(f"{shape} needs {needed} bytes; a block may have {LARGEST_BLOCK}")
    try:
        # Read, not mapped: a block that is cut off meanwhile would end the process.
        with _opened(BLOCKS / name, os.O_RDONLY) as block:
            size = os.fstat(block).st_size
            found = bytearray(needed if size >= needed else 0)
            read = _read(block, memoryview(found))
    except OSError as error:
        raise InvalidRequest(
            "NO_SHARED_MEMORY", f"there is no block {name} of shared memory: {error.strerror}"
        ) from error
    if read < needed:
        raise _bad(f"the block {name} has {size} bytes; {shape} needs {needed}")
    return np.frombuffer(found, dtype).reshape(shape)


def release_blocks(names: Path) -> None:
    """Removes the blocks that the file `names` lists, and the file; those that are gone already do not matter.

    Raises InvalidRequest, before anything is removed, if the file is too long for a list or a line is no name of a
    block.
    """
    lines = _lines(names)
    for name in lines:
        encode_name(name)
    for name in lines:
        with suppress(OSError):  # gone, or another user's
            (BLOCKS / name).unlink()
    names.unlink(missing_ok=True)


def _lines(names: Path) -> list[str]:
    try:
        with _opened(names, os.O_RDONLY) as file:
            data = os.read(file, _LARGEST_LIST + 1)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _bad_list(names, str(error.strerror)) from error
    if len(data) > _LARGEST_LIST:
        raise _bad_list(names, f"more than {_LARGEST_LIST} bytes")
    try:
        return data.decode("ascii").split()
    except UnicodeDecodeError as error:
        raise _bad_list(names, "no list of names") from error


def _append(names: Path, name: str) -> None:
    try:
        with _opened(names, os.O_WRONLY | os.O_CREAT | os.O_APPEND) as file:
            line = f"{name}\n".encode()
            if os.fstat(file).st_size + len(line) > _LARGEST_LIST:
                raise OSError(errno.EFBIG, f"it would have more than {_LARGEST_LIST} bytes")
            os.write(file, line)
    except OSError as error:
        raise _bad_list(names, str(error.strerror)) from error


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    """A descriptor of a plain file: links are not followed, and nothing waits for the other end of a pipe."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a plain file")
        yield descriptor
    finally:
        os.close(descriptor)


def _write(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _read(descriptor: int, into: memoryview) -> int:
    """How many bytes there were."""
    done = 0
    while done < len(into) and (count := os.readv(descriptor, [into[done:]])):
        done += count
    return done


def _name_check(places: Sequence[int]) -> int:
    return sum(places) % 16 & 7


def _shifts(widths: Sequence[int]) -> list[int]:
    """The lowest bit of each dimension: packed downwards from the number of dimensions to the check digits."""
    return [_DIMS_BIT - end for end in accumulate(widths)]


def _bad(what: str) -> InvalidRequest:
    return InvalidRequest("BAD_SHARED_MEMORY_ID", what)


def _bad_list(names: Path, what: str) -> InvalidRequest:
    message = f"{NAMES_FIELD}: {names.name}: {what}"
    return InvalidRequest("BAD_SHARED_MEMORY_LIST", message, field=NAMES_FIELD)
