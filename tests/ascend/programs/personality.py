"""Prints what this process's NPU takes and what it refuses, as JSON."""

import json
import os
from collections.abc import Callable
from typing import Any

import torch
import torch_npu
from torch import Tensor
from torch_npu import npu

from tests.ascend.simulator.errors import Refused

NZ = 29


def half(*shape: int) -> Tensor:
    """Ones in float16."""
    return torch.ones(shape, dtype=torch.float16, device="npu")


def takes(call: Callable[[], object]) -> bool:
    """Whether the device does not refuse it."""
    try:
        call()
    except Refused:
        return False
    return True


def report() -> dict[str, Any]:
    """By name; `takes` for what only some devices do."""
    rows, slots = half(2, 2, 64), torch.tensor([3, 200], dtype=torch.int32, device="npu")
    caches = [half(4, 128, 2, 64) for _ in "kv"]
    weight = torch_npu.npu_format_cast(half(32, 64), NZ)
    tried: dict[str, Callable[[], object]] = {
        "bfloat16": lambda: torch.ones(4, dtype=torch.bfloat16, device="npu") + 1,
        "scatter": lambda: torch_npu.npu_scatter_pa_kv_cache(
            rows, rows, *caches, slots, cache_mode="Norm"
        ),
        "dynamic quantization": lambda: torch_npu.npu_dynamic_quant(rows),
        "norms of 16 bytes": lambda: torch_npu.npu_rms_norm(half(2, 8), half(8)),
        "a part of a cast weight": lambda: weight[:16] + 1,
        "a cast weight in a row": lambda: weight.view(-1) + 1,
    }
    product = torch.nn.functional.linear(half(4, 64), weight)
    return {
        "device": npu.get_device_name(),
        "memory": npu.mem_get_info()[1],
        "product": product.sum().item(),
        "format": str(torch_npu.get_npu_format(weight)),
        "takes": {name: takes(call) for name, call in tried.items()},
    }


def cache_in_nz() -> list[float]:
    """What attention finds of ones written at positions 3 and 72 of two sequences of zeros, on 310P."""
    keys, values = (
        torch_npu.empty_with_format(
            (4, 8, 128, 16), dtype=torch.float16, device="npu", acl_format=NZ
        ).zero_()
        for _ in "kv"
    )
    rows, slots = half(2, 2, 64), torch.tensor([3, 200], dtype=torch.int32, device="npu")
    torch_npu._npu_reshape_and_cache(rows, rows, keys, values, slots)
    table = torch.tensor([[0], [1]], dtype=torch.int32, device="npu")
    lengths, out = torch.tensor([4, 73], dtype=torch.int32), half(2, 2, 64)
    torch_npu._npu_paged_attention(rows, keys, values, 2, 2, 1.0, table, lengths, out)
    return [float(x) for x in out[:, 0, 0].tolist()]


if __name__ == "__main__":
    print(json.dumps({**report(), "cache": cache_in_nz(), "pid": os.getpid()}))
