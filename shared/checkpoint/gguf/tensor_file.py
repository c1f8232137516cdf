"""The tensors of a GGUF file by the names that transformers has for them, mapped."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from shared.checkpoint.gguf.architecture import GgufModel, Placed
from shared.checkpoint.gguf.block_types import NUMBERS
from shared.checkpoint.gguf.header import GgufTensor, read_header

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "F64": torch.float64, "BF16": torch.bfloat16}
_IS_NUMBERS = {kind.name for kind in NUMBERS.values()}


class GgufFile:
    """A `*.gguf` of a model that is known. What is stored as codes is given as the bytes of its rows, uint8 [out, bytes
    of a row]: its shape is that of the numbers all the same, and its element type the name of their blocks."""

    def __init__(self, path: Path) -> None:
        """Raises InvalidRequest as `read_header` and `GgufModel` do."""
        self._model = GgufModel(read_header(path))
        self._bytes = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)

    def names(self) -> Sequence[str]:
        """See `TensorFile`."""
        return list(self._model.tensors)

    def metadata(self) -> Mapping[str, str]:
        """See `TensorFile`."""
        return {"format": "gguf"}

    def tensor(self, name: str) -> torch.Tensor:
        """See `TensorFile`."""
        stored = self._stored(name)
        raw = self._bytes[stored.begin : stored.begin + stored.nbytes]
        if stored.kind.name not in _IS_NUMBERS:
            return raw.view(*stored.shape[:-1], -1)
        dtype = _DTYPES[stored.kind.name]
        # Files may have any alignment that is a power of two.
        raw = raw if stored.begin % dtype.itemsize == 0 else raw.clone()
        return raw.view(dtype).view(stored.shape)

    def part(self, name: str, rows: slice, columns: slice) -> torch.Tensor:
        """See `TensorFile`; of codes whole rows."""
        stored = self._stored(name)
        if stored.kind.name in _IS_NUMBERS:
            return self.tensor(name)[rows, columns]
        if columns not in (slice(None), slice(0, stored.shape[1])):
            raise ValueError(f"{name} is {stored.kind.name}: of codes whole rows are read")
        return self.tensor(name)[rows]

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorFile`."""
        return self._stored(name).shape

    def dtype(self, name: str) -> str:
        """See `TensorFile`; of codes a name in `CODED`."""
        return self._stored(name).kind.name

    def order(self, name: str) -> Sequence[int] | None:
        """See `TensorFile`."""
        found = _order(self.placed(name))
        return None if found is None else found.tolist()

    def placed(self, name: str) -> Placed:
        """What a tensor is made of, and how."""
        return self._model.placed[name]

    def positions(self, name: str) -> torch.Tensor | None:
        """int64 [rows]: what `order` says."""
        return _order(self.placed(name))

    def _stored(self, name: str) -> GgufTensor:
        return self._model.tensors[name]


def _order(placed: Placed) -> torch.Tensor | None:
    """ggml rotates pairs of neighbours, which lie in the two halves of a head elsewhere, and has all queries before the
    keys."""
    rows = torch.arange(placed.tensor.shape[0], device="cpu")  # whatever is built around it
    if placed.heads:
        return rows.view(placed.heads, -1, 2).transpose(1, 2).flatten()
    if placed.together is None:
        return None
    queries, keys, size = placed.together
    parts = [part.view(keys, -1) for part in rows.split([n * size for n in (queries, keys, keys)])]
    return torch.cat(parts, 1).flatten()
