"""Keys and values on which an operator that writes them to a wrong place, or leaves any out, is told."""

from typing import Protocol

import torch
from torch import Tensor

from services.decoder.devices.npu.forms import Form, Writing
from services.decoder.steps.attention_meta import KVSpec, PagedKV

_BLOCKS = 4
_COUNTS = (1, 200)  # rows of a call
_SPREAD = 20.0  # of values, so that their codes are of all sizes


class Writer(Protocol):
    """What writes, such as `NpuOps`."""

    dtype: torch.dtype
    device: torch.device
    block_size: int

    def alloc_kv(self, spec: KVSpec, num_blocks: int) -> PagedKV:
        """Zeros."""

    def export_block(self, kv: PagedKV, block: int) -> tuple[Tensor, Tensor]:
        """Keys and values [tokens of a block, heads, size]."""

    def write_by(self, form: Form | None, k: Tensor, v: Tensor, kv: PagedKV, slots: Tensor) -> None:
        """Writes rows [n, heads, size] to slots, int32 [n]."""


def write_error(ops: Writer, asked: Writing, form: Form) -> float:
    """The largest difference of a cache that was written to from what it should hold; infinity if something in it is
    not finite. Waits for the device."""
    generator = torch.Generator().manual_seed(0)
    spec = KVSpec(asked.num_kv, asked.size, asked.size, ops.dtype, coded=asked.coded)
    dtype = torch.int8 if asked.coded else ops.dtype
    kv, places = ops.alloc_kv(spec, _BLOCKS), _BLOCKS * ops.block_size
    shape = (places, asked.num_kv, asked.size)
    expected = [torch.zeros(shape, dtype=dtype) for _ in range(2)]
    for count in _COUNTS:
        # The first place and the last one are among them.
        inner = 1 + torch.randperm(places - 2, generator=generator)[: max(0, count - 2)]
        slots = torch.cat([torch.tensor([places - 1, 0]), inner])[:count]
        rows = [
            (torch.randn((count, *shape[1:]), generator=generator) * _SPREAD).to(dtype)
            for _ in range(2)
        ]
        for whole, some in zip(expected, rows, strict=True):
            whole[slots] = some
        k, v = (some.to(ops.device) for some in rows)
        ops.write_by(form, k, v, kv, slots.to(ops.device, torch.int32))
    blocks = [ops.export_block(kv, block) for block in range(_BLOCKS)]
    found = [torch.cat([block[part].cpu() for block in blocks]) for part in range(2)]
    if asked.coded:  # blocks come as bytes, scales behind codes
        found = [part[..., : asked.size].contiguous().view(torch.int8) for part in found]
    worst = max(
        (ours.float() - theirs.float()).abs().max()
        for ours, theirs in zip(found, expected, strict=True)
    )
    return float(torch.nan_to_num(worst, nan=float("inf")))
