"""A file of `torch.save`: a dictionary of tensors by name."""

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from shared.checkpoint.files import require_archive

# torch's types by safetensors' spelling.
_SPELLED = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


class TorchFile:
    """A zip archive of `torch.save` with one dictionary of tensors. Nothing but tensors is unpickled from it."""

    def __init__(self, path: Path) -> None:
        require_archive(path)
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (pickle.UnpicklingError, RuntimeError) as error:
            raise ValueError(str(error).splitlines()[0]) from error
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}, not tensors by name")
        others = [str(key) for key, value in content.items() if not torch.is_tensor(value)]
        if others:
            raise ValueError(f"it holds more than tensors: {', '.join(others[:5])}")
        self._tensors: dict[str, torch.Tensor] = content

    def names(self) -> Sequence[str]:
        """See `TensorFile`."""
        return list(self._tensors)

    def metadata(self) -> Mapping[str, str]:
        """See `TensorFile`."""
        return {}

    def tensor(self, name: str) -> torch.Tensor:
        """See `TensorFile`."""
        return self._tensors[name].detach().contiguous()

    def part(self, name: str, rows: slice, columns: slice) -> torch.Tensor:
        """See `TensorFile`."""
        return self._tensors[name].detach()[rows, columns]

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorFile`."""
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> str:
        """See `TensorFile`."""
        own = str(self._tensors[name].dtype).removeprefix("torch.")
        return _SPELLED.get(own, own)

    def order(self, name: str) -> None:
        """None."""
