"""One layer's keys and values as attention on a 910B reads them: heads filled up with zeros."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from services.decoder.steps.attention_meta import PagedKV


@dataclass(frozen=True)
class NpuKV(PagedKV):
    """Keys and values [blocks, block_size, num_kv, P]: heads of `k_size` and `v_size` elements, and zeros."""

    k_size: int
    v_size: int

    def pairs(self) -> Sequence[tuple[Tensor, Tensor]]:
        """All that a block consists of, of keys and of values each, by block."""
        return [(self.k, self.v)]

    def read(self, block: int) -> tuple[Tensor, Tensor]:
        """Copies of a block's keys and values [block_size, num_kv, size]."""
        return self.k[block, ..., : self.k_size].clone(), self.v[block, ..., : self.v_size].clone()

    def replace_block(self, block: int, k: Tensor, v: Tensor) -> None:
        """Takes over what `read` gave."""
        self.k[block, ..., : self.k_size] = k.to(self.k.device)
        self.v[block, ..., : self.v_size] = v.to(self.v.device)

    def numbers(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [n, block_size, num_kv, size] of blocks, int64 [n] on the device."""
        k, v = (x.index_select(0, blocks) for x in (self.k, self.v))
        return k[..., : self.k_size], v[..., : self.v_size]


def widened(x: Tensor, width: int) -> Tensor:
    """Contiguous heads [..., width], what is missing filled up with zeros."""
    return x.contiguous() if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def moved_runs(src: Tensor, dst: Tensor) -> list[tuple[int, int, int]]:
    """Blocks (from, to, count) that lie side by side in both places."""
    runs: list[tuple[int, int, int]] = []
    for old, new in zip(src.tolist(), dst.tolist(), strict=True):
        if runs and runs[-1][0] + runs[-1][2] == old and runs[-1][1] + runs[-1][2] == new:
            first, place, count = runs.pop()
            runs.append((first, place, count + 1))
        else:
            runs.append((old, new, 1))
    return runs


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """On a device, or where there is none pinned on the host, so that copies to and from it need no staging."""
    if device is None:
        return torch.zeros(shape, dtype=dtype, pin_memory=True)
    return torch.zeros(shape, dtype=dtype, device=device)
