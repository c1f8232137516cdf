"""What metrics say of an NPU's memory."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch_npu

from services.decoder.devices.npu.device import NpuDevice as DecoderDevice
from services.vision_encoder.devices.npu.device import NpuDevice as EncoderDevice

MIB = 1 << 20


@pytest.mark.parametrize("kind", [DecoderDevice, EncoderDevice])
def test_memory_is_told_by_what_it_is(kind: type[DecoderDevice | EncoderDevice]) -> None:
    device = kind(torch.float16)
    device.free_unused()
    before = asked(device)
    free, total = torch_npu.npu.mem_get_info()
    assert (before["total"], before["used"]) == (total, total - free)
    held = torch.empty(100 * MIB, dtype=torch.uint8, device="npu")
    taken = asked(device)
    assert (
        held.nbytes <= taken["allocated"] - before["allocated"] < held.nbytes + 4096
    )  # torch rounds up
    assert taken["used"] - before["used"] >= held.nbytes
    del held
    freed = asked(device)
    # Torch keeps it for tensors to come.
    assert freed["allocated"] == before["allocated"]
    assert freed["reserved"] == taken["reserved"] >= freed["allocated"] + 100 * MIB


def asked(device: DecoderDevice | EncoderDevice) -> Mapping[str, int]:
    """By a thread that has not computed."""
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(device.memory_by_kind).result()
    assert found["allocated"] <= found["reserved"] <= found["used"] <= found["total"]
    return found
