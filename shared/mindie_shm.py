"""Tensors in blocks of POSIX shared memory, and their names and shapes as negative int64 among token ids, as MindIE-LLM
passes media to a model. Two ids stand for a tensor: the block's name, and the tensor's shape.

An id that is no valid code and a block that cannot be read are errors here; MindIE-LLM's reader goes on with
uninitialised memory.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from math import prod
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.errors import InvalidRequest, NotFound

Array = npt.NDArray[Any]

LARGEST_BLOCK = 10**9  # bytes

_PREFIX = "psm_"  # of the names that Python gives
_ALPHABET = "0123456789abcdefpsmnwABCDEF"
_LONGEST_NAME = 10  # characters behind the prefix
_FIRST_CHARACTER_BIT = 53
_CHARACTER_BITS = 5
_LENGTH_BIT = 58
_DIMS_BIT = 60
_CHECK_BITS = 3
# Bits of each dimension, by how many there are.
_WIDTHS = {
    1: (57,),
    2: (29, 28),
    3: (19, 19, 19),
    4: (18, 3, 18, 18),
    5: (13, 13, 3, 14, 14),
}


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
    if encode_shape(shape) != code:
        raise _bad(f"{code} is no code of a shape: its check digits differ")
    return shape


def write_block(array: Array, names: Path) -> str:
    """Copies an array to a new block and appends the block's name to the file `names`; returns the name.

    The block stays until `release_blocks`. Raises InvalidRequest for no byte, and for more than LARGEST_BLOCK.
    """
    if not 0 < array.nbytes <= LARGEST_BLOCK:
        raise _bad(f"{array.nbytes} bytes for a block; there may be 1 to {LARGEST_BLOCK}")
    block = SharedMemory(create=True, size=array.nbytes)
    with _closed(block):
        with names.open("a", encoding="utf-8") as file:
            file.write(block.name + "\n")
        np.ndarray(array.shape, array.dtype, block.buf)[...] = array
    return block.name


def read_block(name_code: int, shape_code: int, dtype: npt.DTypeLike) -> Array:
    """A copy of the array that two ids stand for.

    Raises NotFound if the block is gone, InvalidRequest for bad ids and for a block with less bytes.
    """
    name, shape = decode_name(name_code), decode_shape(shape_code)
    try:
        block = SharedMemory(name)
    except FileNotFoundError:
        raise NotFound("NO_SHARED_MEMORY", f"there is no block {name} of shared memory") from None
    with _closed(block):
        needed = prod(shape) * np.dtype(dtype).itemsize
        if block.size < needed:
            raise _bad(f"the block {name} has {block.size} bytes; {shape} needs {needed}")
        return np.ndarray(shape, dtype, block.buf).copy()


def release_blocks(names: Path) -> None:
    """Removes the blocks that the file `names` lists, and the file; those that are gone already do not matter.

    Raises InvalidRequest, before anything is removed, if a line is no name of a block.
    """
    lines = names.read_text(encoding="utf-8").split() if names.exists() else []
    for name in lines:
        encode_name(name)
    for name in lines:
        try:
            block = SharedMemory(name)
        except FileNotFoundError:
            continue
        block.close()
        block.unlink()
    names.unlink(missing_ok=True)


@contextmanager
def _closed(block: SharedMemory) -> Iterator[None]:
    """Closes our mapping in the end. The block itself is left to `release_blocks`, not to the end of this process."""
    resource_tracker.unregister(f"/{block.name}", "shared_memory")
    try:
        yield
    finally:
        block.close()


def _name_check(places: Sequence[int]) -> int:
    return sum(places) % 16 & 7


def _shifts(widths: Sequence[int]) -> list[int]:
    """The lowest bit of each dimension: packed downwards from the number of dimensions to the check digits."""
    return [_DIMS_BIT - end for end in accumulate(widths)]


def _bad(what: str) -> InvalidRequest:
    return InvalidRequest("BAD_SHARED_MEMORY_ID", what)
