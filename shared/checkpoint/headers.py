"""Names, shapes and element types of a checkpoint's tensors, by the headers of its safetensors files alone.

Without torch: it takes milliseconds.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shared.bounded_file import LARGE, open_regular, parse
from shared.checkpoint.files import find_weights, indexed_files, read_header

_WHOLE = {"U8": "<u1", "I32": "<i4", "I64": "<i8"}


class Headers(Protocol):
    """What is known of tensors, by their names in the checkpoint."""

    folder: Path

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor."""

    def dtype(self, name: str) -> str:
        """As safetensors spells it ("F32", "BF16")."""

    def whole_numbers(self, name: str) -> NDArray[np.int64]:
        """The content of a tensor of 8 bits without a sign, or of 32 or 64, that are whole numbers."""


@dataclass(frozen=True, slots=True)
class _Entry:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int  # bytes from the file's begin on
    end: int


class HeaderFiles:
    """See `Headers`."""

    def __init__(self, folder: Path, entries: dict[str, _Entry]) -> None:
        self.folder = folder
        self._entries = entries

    @classmethod
    def open(cls, folder: Path) -> "HeaderFiles | None":
        """None where the folder has no safetensors. Of files that `require_weights` has found whole."""
        weights = find_weights(folder)
        if weights is None:
            return None
        files = indexed_files(folder / weights.name) if weights.is_index else [weights.name]
        if not all(file.endswith(".safetensors") for file in files):
            return None
        entries: dict[str, _Entry] = {}
        for file in files:
            entries |= _entries(folder / file)
        return cls(folder, entries)

    def names(self) -> list[str]:
        """All, sorted."""
        return sorted(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Headers`."""
        return self._entries[name].shape

    def dtype(self, name: str) -> str:
        """See `Headers`."""
        return self._entries[name].dtype

    def whole_numbers(self, name: str) -> NDArray[np.int64]:
        """See `Headers`."""
        entry = self._entries[name]
        with open_regular(entry.file) as file:
            file.seek(entry.begin)
            data = file.read(entry.end - entry.begin)
        return np.frombuffer(data, _WHOLE[entry.dtype]).astype(np.int64)


def _entries(path: Path) -> dict[str, _Entry]:
    head = read_header(path)
    start = 8 + len(head)
    return {
        name: _Entry(
            path,
            str(entry["dtype"]),
            tuple(entry["shape"]),
            *(start + offset for offset in entry["data_offsets"]),
        )
        for name, entry in parse(head, path, LARGE).items()
        if name != "__metadata__"
    }
