"""The digest of a checkpoint's weights: it tells two versions of one model apart without reading all of them.

Of each tensor a few kilobytes are read, at places that follow from its name. Training changes nearly all numbers of the
tensors that it changes at all, so that two versions do not come to have one digest by themselves. A single number that
somebody edits by hand is probably not seen.
"""

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from shared.checkpoint.folder import QUANTIZATION_KEYS, Checkpoint
from shared.errors import InvalidRequest

_PIECE_BYTES = 64
_DRAWN_PIECES = 62  # beside the first and the last
_DIGEST_BYTES = 16
_AT_A_TIME = 16  # a storage that is far away answers many reads in the time of one

_Read = Callable[[int, int], bytes]  # bytes of a tensor from an index on, so many


def content_digest(checkpoint: Checkpoint) -> bytes:
    """16 bytes over the header of each file of weights and 64 pieces of 64 bytes of each tensor, and over what
    config.json says of codes, where it does.

    Equal for equal files, wherever they lie. Raises InvalidRequest for a file that cannot be read.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    files: dict[str, list[str]] = {}
    for name in checkpoint.names():
        files.setdefault(checkpoint.file_of(name), []).append(name)
    for file, names in sorted(files.items()):
        path = checkpoint.folder / file
        is_plain = path.suffix == ".safetensors"
        for part in _safetensors_digests(path) if is_plain else _torch_digests(checkpoint, names):
            digest.update(part)
    if meaning := _meaning_of_codes(checkpoint):
        digest.update(_digest(json.dumps(meaning, sort_keys=True).encode()))
    return digest.digest()


def _meaning_of_codes(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the parts of config.json say of quantized weights: the same codes may stand for several numbers."""
    parts = {
        "config": checkpoint.config,
        "text": checkpoint.text_config,
        "vision": checkpoint.vision_config or {},
    }
    return {
        f"{part}.{key}": config[key]
        for part, config in parts.items()
        for key in QUANTIZATION_KEYS
        if config.get(key)
    }


def _safetensors_digests(path: Path) -> Iterator[bytes]:
    """Of the header, and of each tensor in the order of the header."""
    try:
        with path.open("rb", buffering=0) as file:
            descriptor = file.fileno()
            (length,) = struct.unpack("<Q", os.pread(descriptor, 8, 0))
            header = os.pread(descriptor, length, 8)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            yield _digest(header)
            tensors = [
                (name, 8 + length + begin, end - begin)
                for name, (begin, end) in (
                    (name, entry["data_offsets"])
                    for name, entry in json.loads(header).items()
                    if name != "__metadata__"
                )
            ]

            def tensor_digest(tensor: tuple[str, int, int]) -> bytes:
                name, begin, size = tensor
                return _tensor_digest(
                    name, size, lambda at, count: os.pread(descriptor, count, begin + at)
                )

            with ThreadPoolExecutor(_AT_A_TIME) as readers:
                yield from readers.map(tensor_digest, tensors)
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise InvalidRequest("BAD_CHECKPOINT", f"{path} cannot be read: {error}") from error


def _torch_digests(checkpoint: Checkpoint, names: list[str]) -> Iterator[bytes]:
    """Of each tensor of a file of `torch.save`, whose header is what it says of type and shape."""
    import torch  # the services that only ask for the module's neighbours do without

    for name in names:
        said = json.dumps([name, checkpoint.dtype(name), checkpoint.shape(name)])
        content: torch.Tensor = checkpoint.tensor(name).reshape(-1).view(torch.uint8)

        def read(at: int, count: int, content: torch.Tensor = content) -> bytes:
            return content[at : at + count].numpy().tobytes()

        yield _digest(said.encode())
        yield _tensor_digest(name, len(content), read)


def _tensor_digest(name: str, size: int, read: _Read) -> bytes:
    digest = hashlib.blake2b(name.encode(), digest_size=_DIGEST_BYTES)
    for at, count in _pieces(name, size):
        digest.update(read(at, count))
    return digest.digest()


def _pieces(name: str, size: int) -> list[tuple[int, int]]:
    """Where the pieces of a tensor of so many bytes begin, and how long they are: all of a small one."""
    if size <= _PIECE_BYTES * (_DRAWN_PIECES + 2):
        return [(0, size)]
    last = size - _PIECE_BYTES
    drawn = struct.unpack(
        f"<{_DRAWN_PIECES}Q", hashlib.shake_128(name.encode()).digest(8 * _DRAWN_PIECES)
    )
    return [(at, _PIECE_BYTES) for at in (0, *(number % last for number in drawn), last)]


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
