"""Transfers between host and NPU while others are under way: nothing is read, written or given out again too early."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch_npu import npu

from services.decoder.devices.npu.device import NpuDevice
from tests.ascend.simulator import counters

HALF = torch.float16
COUNT = 64


@pytest.fixture
def device() -> NpuDevice:
    return NpuDevice(HALF)


def test_uploads_run_ahead_of_the_device(device: NpuDevice) -> None:
    """Of more than there are buffers none changes under its copy; that a download has arrived says nothing of later
    ones."""
    device.upload(np.zeros(COUNT, np.int32))
    device.download(torch.zeros(COUNT, dtype=torch.int32, device="npu")).wait()
    sent = [device.upload(np.full(COUNT, number, np.int32))[0] for number in range(12)]
    found = [tensor + 0 for tensor in sent]
    assert [tensor.tolist() for tensor in found] == [[number] * COUNT for number in range(12)]


def test_a_download_is_read_when_it_has_arrived(device: NpuDevice) -> None:
    x = torch.zeros(COUNT, dtype=torch.int32, device="npu")
    downloads = [device.download(x.add_(1)) for _ in range(4)]
    assert [download.wait()[0].tolist() for download in downloads] == [
        [number] * COUNT for number in (1, 2, 3, 4)
    ]


def test_embeddings_come_beside_running_steps(device: NpuDevice) -> None:
    """They are there when the call returns, though what steps have submitted is not; and where a step still reads them
    nothing else is put."""
    values, ones = torch.arange(float(COUNT)), torch.ones(COUNT)
    step = torch.zeros(COUNT, pin_memory=True)
    step.copy_(ones.to("npu"), non_blocking=True)
    here = copied_in(device, values)
    assert not torch.equal(step, ones)  # nobody has waited for the step
    for number in range(1, 4):
        assert here.dtype == HALF and here.shape == values.shape
        read = here * 2
        del here
        here = copied_in(device, values + number)
    assert torch.equal(read.cpu(), (2 * (values + 2)).half())
    assert torch.equal(here.cpu(), (values + 3).half())


def copied_in(device: NpuDevice, values: torch.Tensor) -> torch.Tensor:
    """By another thread than that of steps."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(device.copy_in, values).result()


def test_a_copy_to_pinned_memory_is_not_waited_for(device: NpuDevice) -> None:
    npu.synchronize()
    with counters.counted() as cost:
        device.upload(np.zeros(COUNT, np.int32), np.zeros(3, np.int64))
        device.download(torch.zeros(COUNT, dtype=torch.int32, device="npu"))
    assert not counters.synchronisations(cost)
    assert (cost["copy_h2d"], cost["copy_d2h"]) == (1, 1)
