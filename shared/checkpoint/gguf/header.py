"""The header of a GGUF file: its metadata, and where which tensor lies. Standard library only.

Every count and length in it is compared with what is left of the file, and with a bound, before anything is read or
made by it: the file may come from anywhere. Libraries that read it themselves get it after this.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import os
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.bounded_file import OutOfBounds, open_regular
from shared.checkpoint.gguf.block_types import TYPES, BlockType
from shared.errors import InvalidRequest
from shared.text.cutting import cut

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32  # of the tensors' data, unless the metadata says another
_MOST_ALIGNMENT = 1 << 20
_MOST_KEYS = 1 << 14
_MOST_TENSORS = 1 << 16
_MOST_NAME = 1 << 12  # bytes of a key, or of a tensor's name
_MOST_TEXT = 16 << 20  # bytes of a text
_MOST_VALUES = 4_000_000  # of all lists together; released files have up to a million
_MOST_KEPT = 1 << 16  # numbers of one list
_MOST_DIMENSIONS = 4
_TEXT, _LIST = 8, 9
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip


@dataclass(frozen=True)
class Texts:
    """A list of texts in the metadata, of which only the number is read."""

    count: int


@dataclass(frozen=True)
class GgufTensor:
    """`shape` is [out, inputs] as torch has it, the reverse of ggml's order; `begin` counts from the file's begin."""

    name: str
    kind: BlockType
    shape: tuple[int, ...]
    begin: int
    nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    """What a file says before its tensors."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    nbytes: int  # up to the first tensor

    def refusal(self, what: str) -> InvalidRequest:
        """The error of a file that cannot be used."""
        return _bad(self.path, what)


def read_header(path: Path) -> GgufHeader:
    """Raises InvalidRequest, naming the key or the tensor, for what is no GGUF file or no whole one, and for types of
    tensors that are not known."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if not size:
                raise _bad(path, "it is empty: download it again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read(path, data, size)
    except OutOfBounds as error:
        raise _bad(path, str(error)) from None
    except OSError as error:
        raise _bad(path, f"it cannot be read: {error}") from None


def is_gguf(path: Path) -> bool:
    """Whether a file begins as these do, whatever its name: Ollama's end in a digest. False for what cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except (OutOfBounds, OSError):
        return False


class _Reader:
    """Values one after the other."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path, self.data, self.size = path, data, size
        self.at = 0
        self.where = "its first bytes"
        self._values = 0

    def scalar(self, form: str) -> Any:
        begin = self.at
        self.skip(struct.calcsize(form))
        return struct.unpack_from(form, self.data, begin)[0]

    def skip(self, nbytes: int) -> None:
        if nbytes > self.size - self.at:
            raise self.bad("the file ends in it: download it again")
        self.at += nbytes

    def text(self, most: int = _MOST_TEXT) -> str:
        begin, end = self._text_place(most)
        try:
            return self.data[begin:end].decode("utf-8")
        except UnicodeDecodeError:
            raise self.bad("it is no UTF-8") from None

    def value(self) -> Any:
        kind = self.scalar("<I")
        if kind == _TEXT:
            return self.text()
        if kind != _LIST:
            return self.scalar(self._form(kind))
        kind, count = self.scalar("<I"), self.scalar("<Q")
        self._values += count
        if self._values > _MOST_VALUES:
            raise self.bad(f"lists of more than {_MOST_VALUES:,} values are not read")
        if kind == _TEXT:
            self._skip_texts(count)
            return Texts(count)
        form = self._form(kind)
        begin = self.at
        self.skip(count * struct.calcsize(form))
        return struct.unpack_from(f"<{min(count, _MOST_KEPT)}{form[1]}", self.data, begin)

    def bad(self, what: str) -> InvalidRequest:
        return _bad(self.path, f"{self.where}: {what}")

    def _form(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise self.bad(f"a value of type {kind}, which is not known")
        return _SCALARS[kind]

    def _text_place(self, most: int) -> tuple[int, int]:
        length = self.scalar("<Q")
        if length > most:
            raise self.bad(f"a text of {length:,} bytes; {most:,} are read at most")
        begin = self.at
        self.skip(length)
        return begin, self.at

    def _skip_texts(self, count: int) -> None:
        """By hand: there are hundreds of thousands."""
        at, last, unpack, data = self.at, self.size - 8, struct.Struct("<Q").unpack_from, self.data
        for _ in range(count):
            if at > last:
                raise self.bad("the file ends in it: download it again")
            at += 8 + unpack(data, at)[0]
        if at > self.size:
            raise self.bad("the file ends in it: download it again")
        self.at = at


def _read(path: Path, data: mmap.mmap, size: int) -> GgufHeader:
    reader = _Reader(path, data, size)
    if data[:4] != _MAGIC:
        lfs = data[:7] == b"version"
        raise _bad(path, "it is a git-lfs pointer: run `git lfs pull`" if lfs else "it is no GGUF")
    reader.skip(4)
    version = reader.scalar("<I")
    if version not in _VERSIONS:
        turned = int.from_bytes(version.to_bytes(4, "little"), "big")
        order = ", in big-endian order" if turned in _VERSIONS else ""
        raise _bad(path, f"it has version {turned if order else version}{order}; 2 and 3 are read")
    tensors, keys = reader.scalar("<Q"), reader.scalar("<Q")
    for count, most, what in ((keys, _MOST_KEYS, "keys"), (tensors, _MOST_TENSORS, "tensors")):
        if count > most:
            raise _bad(path, f"it says that it has {count:,} {what}; {most:,} are read at most")
    metadata = _read_metadata(reader, keys)
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if (
        type(alignment) is not int
        or not 0 < alignment <= _MOST_ALIGNMENT
        or alignment & alignment - 1
    ):
        raise _bad(
            path, f"general.alignment is {cut(repr(alignment), 40)}, which is no power of two"
        )
    found = [_read_tensor(reader, index) for index in range(tensors)]
    begin = -(-reader.at // alignment) * alignment
    placed = {name: make(begin, alignment) for name, make in found}
    if len(placed) < len(found):
        [(twice, _)] = Counter(name for name, _ in found).most_common(1)
        raise _bad(path, f"the tensor {cut(twice, 80)} is there twice")
    _require_apart(path, placed)
    return GgufHeader(path, metadata, placed, begin)


def _read_metadata(reader: _Reader, count: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number in range(count):
        reader.where = f"key number {number} of {count}"
        key = reader.text(_MOST_NAME)
        reader.where = f"the key {cut(key, 80)}"
        if key in found:
            raise reader.bad("it is there twice")
        found[key] = reader.value()
    return found


def _read_tensor(reader: _Reader, number: int) -> tuple[str, Callable[[int, int], GgufTensor]]:
    """Its name, and what gives it once it is known where data begin."""
    reader.where = f"tensor number {number}"
    name = reader.text(_MOST_NAME)
    reader.where = f"the tensor {cut(name, 80)}"
    dimensions = reader.scalar("<I")
    if not 0 < dimensions <= _MOST_DIMENSIONS:
        raise reader.bad(f"it has {dimensions} dimensions; 1 to {_MOST_DIMENSIONS} are read")
    sizes = [reader.scalar("<Q") for _ in range(dimensions)]
    kind = reader.scalar("<I")
    offset = reader.scalar("<Q")
    if kind not in TYPES:
        known = ", ".join(found.name for found in TYPES.values())
        raise reader.bad(f"it has the type {kind}, which is not read; {known} are")
    block = TYPES[kind]
    if sizes[0] % block.elements:
        raise reader.bad(
            f"its rows of {sizes[0]} are no whole blocks of {block.name}, which have {block.elements}"
        )
    nbytes = math.prod(sizes) // block.elements * block.nbytes
    if not nbytes:
        raise reader.bad(f"its sizes are {sizes}: it is empty")
    path, where, size = reader.path, reader.where, reader.size

    def place(begin: int, alignment: int) -> GgufTensor:
        if offset % alignment:
            raise _bad(path, f"{where} begins at {offset}, which is no multiple of {alignment}")
        if begin + offset + nbytes > size:
            raise _bad(
                path,
                f"{where} {sizes[::-1]} ends at byte {begin + offset + nbytes:,} of {size:,}: download the file again",
            )
        return GgufTensor(name, block, tuple(reversed(sizes)), begin + offset, nbytes)

    return name, place


def _require_apart(path: Path, tensors: Mapping[str, GgufTensor]) -> None:
    end, before = 0, ""
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.begin):
        if tensor.begin < end:
            raise _bad(path, f"the tensors {cut(before, 80)} and {cut(tensor.name, 80)} overlap")
        end, before = tensor.begin + tensor.nbytes, tensor.name


def _bad(path: Path, what: str) -> InvalidRequest:
    return InvalidRequest("BAD_CHECKPOINT", f"{path} cannot be used: {what}", field="model")
