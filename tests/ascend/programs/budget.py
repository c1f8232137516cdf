"""Prints, as JSON, what decoders may take for their caches on this process's NPU, with something of every kind in its
memory."""

import ctypes
import json

import torch
from torch import Tensor
from torch_npu import npu

from services.decoder.devices.npu.device import NpuDevice
from services.decoder.steps.attention_meta import KVSpec
from shared.errors import Unavailable
from tests.ascend.simulator import runtime, workspaces

MIB = 1 << 20
WEIGHTS, OUTSIDE, PARTS = 8 * MIB, 6 * MIB, (40 * MIB, 16 * MIB)
# Share of the memory, decoders on the device, bytes in reserve.
CASES = [(None, 1, None), (0.5, 1, 0), (0.5, 3, 0), (None, 2, 512 * MIB)]
SIZES = (64, 80, 128)


def half(nbytes: int) -> Tensor:
    """So many bytes of the device's memory."""
    return torch.zeros(nbytes // 2, dtype=torch.float16, device="npu")


def take_outside_of_torch(nbytes: int) -> None:
    """As CANN's libraries do."""
    place = ctypes.c_void_p()
    size = ctypes.c_size_t(nbytes)
    assert not runtime.library().aclrtMalloc(ctypes.byref(place), size, 0)


def refusal(device: NpuDevice, sharers: int) -> str:
    """What is said where so many decoders find too little memory free; empty where it is enough."""
    try:
        device.require_free(None, sharers)
    except Unavailable as error:
        return error.message
    return ""


def block_bytes(device: NpuDevice, size: int) -> list[int]:
    """Of a block: what is counted, and what it takes."""
    spec = KVSpec(2, size, size, torch.float16)
    kv = device.ops.alloc_kv(spec, 4)
    taken = sum(part.untyped_storage().nbytes() for part in (kv.k, kv.v))
    return [device.ops.block_bytes(spec), taken // 4]


def main() -> None:
    """A decoder with weights, after its largest step."""
    device = NpuDevice(torch.float16)
    weights = half(WEIGHTS)
    before = half(70 * MIB)
    del before  # cached, and higher than the step

    def step() -> None:
        for nbytes in PARTS:  # one after the other
            half(nbytes)

    step_bytes = device.peak_bytes(step)
    take_outside_of_torch(OUTSIDE)
    unused = npu.memory_reserved() - npu.memory_allocated()
    budgets = [
        device.cache_budget(share, sharers, step_bytes, reserved).nbytes
        for share, sharers, reserved in CASES
    ]
    found = {
        "total": npu.mem_get_info()[1],
        "weights": weights.nbytes,
        "step": step_bytes,
        "cann": workspaces.of_cann(),
        "unused": [unused, npu.memory_reserved() - npu.memory_allocated()],
        "budgets": budgets,
        "blocks": [block_bytes(device, size) for size in SIZES],
        "swapped": [device.swap_bytes(sharers) for sharers in (1, 2, 1 << 20)],
        "refusals": [refusal(device, sharers) for sharers in (1, 2)],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
