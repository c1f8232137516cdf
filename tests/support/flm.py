"""Files of FastLLM, written by the description of their format: little-endian numbers, texts behind their lengths."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.torch import load_file

FLOAT32, BFLOAT16, INT8, INT4, FLOAT16, INT4_NO_ZERO, INT4_GROUP = 0, 1, 3, 4, 7, 8, 9
Floats = npt.NDArray[np.float32]
Words = list[tuple[bytes, int, float | None]]

# ChatGLM2's early files: pieces without scores, of which many begin alike.
TRIE: Words = [
    (piece, index, None)
    for index, piece in enumerate(
        (
            *(b"<unk>", b"<s>", b"</s>", b"<n>", b"<|tab|>", b"\xe7"),
            *(bytes([byte]) for byte in range(97, 123)),
            *(b"the", b"ther", b"thermal", b"er", b"(.+)", b"[", b"]"),
            *(word.encode() for word in ("▁", "▁the", "图", "图中", "图中有一", "有", "一")),
        )
    )
]


@dataclass
class FlmTensorFile:
    """A tensor as it is written, and the values that it then has. `data`: from the number of its type on."""

    shape: tuple[int, ...]
    data: bytes
    values: Floats


@dataclass
class Flm:
    """What a file holds; `words` are (bytes, id, score), the score None where none is written."""

    pairs: dict[str, str]
    words: Words
    tensors: Mapping[str, FlmTensorFile]
    special_tokens: Sequence[str] = ()
    adapters: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    version: int = 2

    def to_bytes(self) -> bytes:
        """The whole file."""
        parts = [number(self.version), *_pairs(self.pairs)]
        for name, pairs in self.adapters.items():
            parts += [text(name), *_pairs(pairs)]
        parts.append(number(len(self.words)))
        for word, index, score in self.words:
            # As a compiler whose char is signed writes it.
            signed = [byte - 256 if byte > 127 else byte for byte in word]
            parts += [number(len(word)), *map(number, signed), number(index)]
            if score is not None:
                parts.append(struct.pack("<f", score))
        if self.pairs.get("tokenizer_has_special_tokens") == "1":
            parts += [number(len(self.special_tokens)), *map(text, self.special_tokens)]
        parts.append(number(len(self.tensors)))
        for name, tensor in self.tensors.items():
            parts += [text(name), number(len(tensor.shape)), *map(number, tensor.shape)]
            parts.append(tensor.data)
        return b"".join(parts)

    def write(self, path: Path) -> Path:
        """Writes the file."""
        path.write_bytes(self.to_bytes())
        return path


def number(value: int) -> bytes:
    """Of 32 bits."""
    return struct.pack("<i", value)


def text(value: str) -> bytes:
    """Behind its length."""
    return number(len(value.encode())) + value.encode()


def tensor(values: Floats, kind: int, *, axis: int = 0, width: int = 4) -> FlmTensorFile:
    """Values in a type; those of the codes are computed one by one. `width`: of the groups of INT4_GROUP."""
    values = np.ascontiguousarray(values, np.float32)
    if kind == FLOAT32:
        return FlmTensorFile(values.shape, number(kind) + values.tobytes(), values)
    if kind == FLOAT16:
        half = values.astype(np.float16)
        return FlmTensorFile(values.shape, number(kind) + half.tobytes(), half.astype(np.float32))
    if kind == BFLOAT16:
        upper = (values.view(np.uint32) >> 16).astype(np.uint16)
        cut = (upper.astype(np.uint32) << 16).view(np.float32)
        return FlmTensorFile(values.shape, number(kind) + upper.tobytes(), cut)
    return _quantized(values, kind, axis, width)


def tensors(folder: Path, kind: int) -> dict[str, FlmTensorFile]:
    """A checkpoint's weights as FastLLM's exporter writes them: matrices in a type, the rest as float32."""
    return {
        name: tensor(
            values.float().numpy(), kind if values.ndim == 2 and "embed" not in name else FLOAT32
        )
        for name, values in load_file(folder / "model.safetensors").items()
    }


def reference_ids(words: Words, text: bytes) -> list[int] | None:
    """Plainly: at each place the longest token; None where there is none."""
    by_text = {word: index for word, index, _ in words}
    ids, at = [], 0
    while at < len(text):
        sizes = [size for size in range(len(text) - at, 0, -1) if text[at : at + size] in by_text]
        if not sizes:
            return None
        ids.append(by_text[text[at : at + sizes[0]]])
        at += sizes[0]
    return ids


def _quantized(values: Floats, kind: int, axis: int, width: int) -> FlmTensorFile:
    head = number(kind) + number(axis)
    groups = -(-values.shape[-1] // width)
    if kind == INT4_GROUP:
        head += number(groups) + number(width)
    channels: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for place in np.ndindex(values.shape):
        channel = 0 if axis == -1 else place[axis]
        group = place[-1] // width if kind == INT4_GROUP else 0
        channels.setdefault((channel, group), []).append(place)
    codes = np.zeros(values.shape, np.uint8)
    known = np.zeros(values.shape, np.float32)
    most = 255 if kind == INT8 else 15
    for _, places in sorted(channels.items()):
        found = [float(values[place]) for place in places]
        low, high = (float(np.float32(value)) for value in (min(found), max(found)))
        head += struct.pack("<ff", low, high)
        low, high = min(low, 0.0), max(high, 0.0)
        scale = (high - low) / most
        zero = int(-low / scale + 0.5)
        for place, value in zip(places, found, strict=True):
            codes[place] = min(most, max(0, int(value / scale + zero + 0.5)))
            known[place] = scale * (int(codes[place]) - zero)
    flat = codes.reshape(-1)
    if kind != INT8:
        even = np.append(flat, np.zeros(len(flat) % 2, np.uint8))
        return FlmTensorFile(values.shape, head + (even[::2] << 4 | even[1::2]).tobytes(), known)
    return FlmTensorFile(values.shape, head + flat.tobytes(), known)


def _pairs(pairs: Mapping[str, str]) -> list[bytes]:
    return [number(len(pairs)), *(text(part) for pair in pairs.items() for part in pair)]
