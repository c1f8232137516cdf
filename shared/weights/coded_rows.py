"""A matrix of which single rows are wanted, as a token embedding, and which is stored as codes."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor


class CodedRows:
    """[count, width]; rows become numbers when they are asked for."""

    def __init__(self, stored: Tensor, width: int, read: Callable[[Tensor], Tensor]) -> None:
        """stored: uint8 [count, bytes of a row], which may be mapped; read: gives the numbers of some of these rows in
        float32."""
        self._stored, self._read = stored, read
        self.width = width

    def __len__(self) -> int:
        return len(self._stored)

    def rows(self, ids: Tensor) -> Tensor:
        """float32 [T, width] of ids [T]."""
        return self._read(self._stored[ids])

    def dense(self, dtype: torch.dtype) -> Tensor:
        """All of them, [count, width]."""
        found = torch.empty((len(self), self.width), dtype=dtype)
        step = max(1, (1 << 24) // self.width)
        for first in range(0, len(self), step):
            rows = slice(first, first + step)
            found[rows] = self._read(self._stored[rows])
        return found


Table: TypeAlias = "Tensor | CodedRows"
