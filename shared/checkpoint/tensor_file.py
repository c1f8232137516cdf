"""A file of tensors by name, in safetensors, as `torch.save` writes it or as llama.cpp does: sizes by its header, data
mapped."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from shared.bounded_file import LARGE, require_few
from shared.checkpoint.files import MMPROJ, read_header
from shared.text.rust_panic import RustPanic, panics_as_errors

if TYPE_CHECKING:
    import torch


class TensorFile(Protocol):
    """Tensors by name."""

    def names(self) -> Sequence[str]:
        """As the file has them."""

    def metadata(self) -> Mapping[str, str]:
        """What the file says beside its tensors."""

    def tensor(self, name: str) -> "torch.Tensor":
        """Contiguous and mapped where the file allows it: not to be written to."""

    def part(self, name: str, rows: slice, columns: slice) -> "torch.Tensor":
        """Some rows and columns of a matrix; the rest is not read. Not to be written to."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Read without the data."""

    def dtype(self, name: str) -> str:
        """As safetensors spells it ("F32", "BF16"); read without the data."""

    def order(self, name: str) -> "Sequence[int] | None":
        """Which stored row each row of a tensor is; None where they lie as they are counted."""


def open_tensors(path: Path) -> TensorFile:
    """Opens a file by the end of its name.

    Raises ValueError, InvalidRequest or OSError saying why it cannot be read.
    """
    if path.suffix == ".safetensors":
        return SafetensorsFile(path)
    # By their names: services without torch import this module for a folder's configuration.
    opened: TensorFile
    if path.name == MMPROJ:
        opened = import_module("shared.checkpoint.gguf.vision.tensor_file").VisionFile(path)
    elif path.suffix == ".gguf":
        opened = import_module("shared.checkpoint.gguf.tensor_file").GgufFile(path)
    else:
        opened = import_module("shared.checkpoint.torch_file").TorchFile(path)
    return opened


class SafetensorsFile:
    """A `*.safetensors`."""

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        require_few(read_header(path), path, LARGE)
        try:
            with panics_as_errors():
                self._file: Any = safe_open(path, framework="pt")
        except (SafetensorError, RustPanic) as error:
            raise ValueError(str(error)) from error

    def names(self) -> Sequence[str]:
        """See `TensorFile`."""
        return list(self._file.keys())

    def metadata(self) -> Mapping[str, str]:
        """See `TensorFile`."""
        return self._file.metadata() or {}

    def tensor(self, name: str) -> "torch.Tensor":
        """See `TensorFile`."""
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor

    def part(self, name: str, rows: slice, columns: slice) -> "torch.Tensor":
        """See `TensorFile`."""
        part: torch.Tensor = self._file.get_slice(name)[rows, columns]
        return part

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorFile`."""
        return tuple(self._file.get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """See `TensorFile`."""
        return str(self._file.get_slice(name).get_dtype())

    def order(self, name: str) -> None:
        """None."""
