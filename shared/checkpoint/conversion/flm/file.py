"""A `.flm` as FastLLM writes it: pairs of texts, a vocabulary, tensors. Data stay where they are in the mapped file.

Source: `WeightMap::LoadFromFile` and `torch2flm.py` of https://github.com/ztxz16/fastllm.
"""

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from shared.checkpoint.conversion.flm.reader import Reader
from shared.checkpoint.conversion.flm.tensor import FlmTensor, TensorKind
from shared.errors import InvalidRequest
from shared.text.tokenizer_formats.flm import Word

_VERSIONS = (0, 1, 2)
_MOST_DIMENSIONS = 8


@dataclass(frozen=True, slots=True)
class FlmFile:
    """`pairs`: what the writer knew of model and tokenizer, all as text. `adapters`: names of adapters of PEFT."""

    pairs: Mapping[str, str]
    adapters: list[str]
    words: list[Word]
    special_tokens: list[str]
    tensors: list[FlmTensor]


def open_flm(path: Path) -> FlmFile:
    """Reads all but the tensors' data, whose places are checked.

    Raises InvalidRequest with the offset, or the tensor's name, for what is no whole `.flm`; OSError.
    """
    with path.open("rb") as file:
        if not path.stat().st_size:
            raise InvalidRequest("BAD_FLM", f"{path.name}: the file is empty")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    reader = Reader(memoryview(mapped), path.name)
    if (version := reader.integer()) not in _VERSIONS:
        reader.refuse(f"version {version} is none of {_VERSIONS}: this is no .flm that is known", 0)
    pairs = _pairs(reader) if version else {}
    adapters = _adapters(reader, pairs.get("peft_size", "0"))
    words = _words(reader, has_scores=pairs.get("tokenizer_use_score") == "1")
    special = []
    if pairs.get("tokenizer_has_special_tokens") == "1":
        special = [reader.string() for _ in range(reader.count("special tokens", 4))]
    tensors: dict[str, FlmTensor] = {}
    for _ in range(reader.count("tensors", 12)):
        at = reader.at
        tensor = _tensor(reader)
        if tensor.name in tensors:
            reader.refuse(f"a second tensor {tensor.name!r}", at)
        tensors[tensor.name] = tensor
    reader.require_end()
    return FlmFile(pairs, adapters, words, special, list(tensors.values()))


def _pairs(reader: Reader) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for _ in range(reader.count("pairs", 8)):
        at, key = reader.at, reader.string()
        if key in pairs:
            reader.refuse(f"a second value of {key!r}", at)
        pairs[key] = reader.string()
    return pairs


def _adapters(reader: Reader, size: str) -> list[str]:
    if not (size.isascii() and size.isdigit() and len(size) < 10):
        reader.refuse(f"peft_size is {size!r}, which is no number", reader.at)
    names = []
    for _ in range(int(size)):
        names.append(reader.string())
        _pairs(reader)
    return names


def _words(reader: Reader, *, has_scores: bool) -> list[Word]:
    """The vocabulary. Raises InvalidRequest for two tokens of one id or of the same bytes."""
    ids: set[int] = set()
    texts: set[bytes] = set()
    words = []
    for _ in range(reader.count("tokens", 12 if has_scores else 8)):
        at, text, index = reader.at, reader.word(), reader.integer()
        if index < 0 or index in ids or text in texts:
            reader.refuse(f"token {text!r} of id {index}: negative, or there twice", at)
        ids.add(index)
        texts.add(text)
        words.append(Word(text, index, reader.real() if has_scores else None))
    return words


def _tensor(reader: Reader) -> FlmTensor:
    at, name = reader.at, reader.string()
    dimensions = reader.count("dimensions", 4)
    if dimensions > _MOST_DIMENSIONS:
        reader.refuse(f"tensor {name!r} has {dimensions} dimensions", at)
    shape = tuple(reader.integer() for _ in range(dimensions))
    if not shape or min(shape) <= 0:
        reader.refuse(f"tensor {name!r} has the shape {shape}", at)
    number = reader.integer()
    try:
        kind = TensorKind(number)
    except ValueError:
        reader.refuse(f"tensor {name!r} is of type {number}, which is not read", at)
    axis, groups, width, channels = 0, 1, 0, 0
    if kind.is_quantized:
        axis = reader.integer()
        if not -1 <= axis < len(shape):
            reader.refuse(f"tensor {name!r} is quantized along axis {axis} of {shape}", at)
        channels = 1 if axis == -1 else shape[axis]
    if kind == TensorKind.INT4_GROUP:
        groups, width = reader.integer(), reader.integer()
        whole = len(shape) == 2 and axis == 0 and width > 0 and groups == -(-shape[1] // width)
        if not whole:
            reader.refuse(f"tensor {name!r}: {groups} groups of {width} for {shape}", at)
    within = f"tensor {name!r}"
    ranges = reader.take(8 * channels * groups, within)
    data = reader.take(-(-prod(shape) * kind.bits // 8), within)
    return FlmTensor(name, shape, kind, axis, width, ranges, data)
