"""A file of safetensors that is read again when it is written."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from shared.checkpoint.tensor_file import TensorFile, open_tensors
from shared.errors import Precondition

Tensors = dict[str, torch.Tensor]


def write_tensors(path: Path, tensors: Tensors, metadata: dict[str, str]) -> None:
    """Raises Precondition, naming the tensor, unless the file then has just these tensors, bit for bit."""
    save_file(tensors, path, metadata)
    for what in _differences(open_tensors(path), tensors, metadata):
        raise Precondition("COPY_DIFFERS", f"{path.name} is not what was written to it: {what}")


def _differences(file: TensorFile, tensors: Tensors, metadata: Mapping[str, str]) -> Iterator[str]:
    yield from sorted(tensors.keys() ^ set(file.names()))
    if file.metadata() != metadata:
        yield "its metadata"
    for name, tensor in tensors.items():
        found = file.tensor(name)
        if (found.shape, found.dtype) != (tensor.shape, tensor.dtype) or not torch.equal(
            _bits(found), _bits(tensor)
        ):
            yield name


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
