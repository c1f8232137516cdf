"""The tensors of a vision part by the names that transformers has for them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from shared.checkpoint.gguf.block_types import CODED
from shared.checkpoint.gguf.header import GgufTensor
from shared.checkpoint.gguf.vision.kinds import open_projector
from shared.checkpoint.gguf.vision.tensors import VisionTensor

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "F64": torch.float64, "BF16": torch.bfloat16}


class VisionFile:
    """A `*.gguf` of a vision part. All of its tensors are numbers: codes become those that they stand for, float32,
    each time that they are asked for."""

    def __init__(self, path: Path) -> None:
        """Raises InvalidRequest as `open_projector` does."""
        self._tensors: Mapping[str, VisionTensor] = open_projector(path).tensors
        self._bytes = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)

    def names(self) -> Sequence[str]:
        """See `TensorFile`."""
        return list(self._tensors)

    def metadata(self) -> Mapping[str, str]:
        """See `TensorFile`."""
        return {"format": "gguf"}

    def tensor(self, name: str) -> torch.Tensor:
        """See `TensorFile`."""
        found = self._tensors[name]
        parts = [self._numbers(part) for part in found.parts]
        if len(parts) == 1:
            return parts[0].view(found.shape)
        dtype = _DTYPES[found.dtype]
        alike = [part.to(dtype) for part in parts]
        joined = torch.stack(alike, 2) if found.joined == "moments" else torch.cat(alike)
        return joined.view(found.shape)

    def part(self, name: str, rows: slice, columns: slice) -> torch.Tensor:
        """See `TensorFile`."""
        return self.tensor(name)[rows, columns]

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorFile`."""
        return self._tensors[name].shape

    def dtype(self, name: str) -> str:
        """See `TensorFile`."""
        return self._tensors[name].dtype

    def order(self, name: str) -> None:
        """None."""

    def _numbers(self, stored: GgufTensor) -> torch.Tensor:
        raw = self._bytes[stored.begin : stored.begin + stored.nbytes]
        if stored.kind.name in CODED:
            # Few files need it; importing it takes a moment.
            from gguf import GGMLQuantizationType, dequantize

            kind = GGMLQuantizationType[stored.kind.name]
            rows = raw.view(int(np.prod(stored.shape[:-1])), -1)
            return torch.from_numpy(np.asarray(dequantize(rows.numpy(), kind))).view(stored.shape)
        dtype = _DTYPES[stored.kind.name]
        raw = raw if stored.begin % dtype.itemsize == 0 else raw.clone()
        return raw.view(dtype).view(stored.shape)
