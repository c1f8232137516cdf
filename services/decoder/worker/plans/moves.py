"""Blocks that a plan moves before its rows run: out to the host, from place to place, back in."""

from collections.abc import Sequence

import torch

from services.decoder.devices.base.device import Device
from services.decoder.steps.attention_meta import PagedKV
from services.decoder.worker.plans.plan import Ints, Plan


def apply_moves(
    plan: Plan, device: Device, caches: Sequence[PagedKV], host: Sequence[PagedKV]
) -> None:
    """Swap-outs, then copies in their order, then swap-ins, in every layer."""
    ops = device.ops
    if len(plan.swap_out_device):
        src, dst = _index(plan.swap_out_device), _index(plan.swap_out_host)
        for here, there in zip(caches, host, strict=True):
            ops.swap_blocks(here, there, src, dst)
    if len(plan.copy_src):
        for some_src, some_dst in _independent(plan.copy_src, plan.copy_dst):
            src, dst = device.upload(some_src.astype("int64"), some_dst.astype("int64"))
            for layer in caches:
                ops.copy_blocks(layer, src, dst)
    if len(plan.swap_in_host):
        src, dst = _index(plan.swap_in_host), _index(plan.swap_in_device)
        for here, there in zip(caches, host, strict=True):
            ops.swap_blocks(there, here, src, dst)


def _independent(src: Ints, dst: Ints) -> list[tuple[Ints, Ints]]:
    """All copies at once, or one by one where the order matters."""
    targets = set(dst.tolist())
    if len(targets) == len(dst) and targets.isdisjoint(src.tolist()):
        return [(src, dst)]
    return [(src[i : i + 1], dst[i : i + 1]) for i in range(len(src))]


def _index(blocks: Ints) -> torch.Tensor:
    return torch.from_numpy(blocks.astype("int64"))
