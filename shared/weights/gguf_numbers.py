"""The tensors of a GGUF file as numbers, as a class of transformers has them."""

from functools import partial

import torch
from torch import Tensor

from shared.checkpoint.files import GGUF
from shared.checkpoint.folder import Checkpoint
from shared.checkpoint.gguf.block_types import CODED
from shared.checkpoint.gguf.tensor_file import GgufFile
from shared.weights.asked_tensors import Asked, Reads
from shared.weights.readers.gguf import read_numbers

_AT_ONCE = 1 << 24  # elements whose blocks are taken apart together


def gguf_state_dict(checkpoint: Checkpoint, dtype: torch.dtype, reads: Reads) -> dict[str, Asked]:
    """All tensors by their names, in memory of their own where they are not stored as they are wanted. Raises
    InvalidRequest as `GgufFile` does."""
    file = GgufFile(checkpoint.folder / GGUF)
    return {name: Asked(reads, partial(_numbers, file, name, dtype)) for name in file.names()}


def _numbers(file: GgufFile, name: str, dtype: torch.dtype) -> Tensor:
    kind, stored, placed = file.dtype(name), file.tensor(name), file.placed(name)
    if kind in CODED:
        shape = file.shape(name)
        rows = stored.flatten(0, -2)
        step = max(1, _AT_ONCE // shape[-1])
        stored = torch.cat([read_numbers(kind, part).to(dtype) for part in rows.split(step)])
        stored = stored.view(shape)
    if (order := file.positions(name)) is not None:
        stored = stored[order]
    if placed.shift:
        stored = stored.float() - placed.shift
    return stored.to(dtype)
