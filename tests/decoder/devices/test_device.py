"""What every device gives: transfers, memory, sizes of blocks."""

from typing import Any

import numpy as np
import pytest
import torch

from services.decoder.devices import device_class
from services.decoder.devices.base.device import Device
from services.decoder.devices.cpu.device import CpuDevice
from services.decoder.steps.attention_meta import KVSpec
from shared.errors import InvalidRequest
from shared.hardware.ascend import npu_fault
from shared.hardware.devices import DEVICES, cuda_fault
from tests.support.decoder.deferred_device import DeferredDevice

DEVICE_KINDS = [
    CpuDevice,
    DeferredDevice,
    pytest.param(
        "cuda", marks=pytest.mark.skipif(bool(cuda_fault()), reason="there is no CUDA device here")
    ),
]


@pytest.fixture(params=DEVICE_KINDS)
def device(request: pytest.FixtureRequest) -> Device:
    kind = device_class(request.param) if isinstance(request.param, str) else request.param
    return kind(torch.float32, threads=1)


@pytest.mark.parametrize("name", DEVICES)
def test_every_known_device_has_a_class(name: str) -> None:
    if name == "npu" and npu_fault():
        pytest.skip("torch_npu cannot be imported here")
    assert device_class(name).name == name


class OneSize(CpuDevice):
    """Has no blocks but its own."""

    default_block_size = 128
    only_block_size = True


def test_a_block_size_that_a_device_does_not_have_is_refused() -> None:
    assert OneSize(torch.float32, threads=1).block_size == 128
    assert OneSize(torch.float32, threads=1, block_size=128).block_size == 128
    with pytest.raises(InvalidRequest, match=r"--block-size 16: .* blocks have 128 tokens"):
        OneSize(torch.float32, threads=1, block_size=16)


def test_arrays_arrive_as_they_are(device: Device) -> None:
    arrays: list[np.ndarray[Any, Any]] = [
        np.arange(7, dtype=np.int64),
        np.arange(12, dtype=np.int32).reshape(3, 4),
        np.arange(20, dtype=np.int32).reshape(4, 5)[:, 1:3],
        np.linspace(0, 1, 5, dtype=np.float32)[None],
        np.zeros((3, 0), np.int64),
        np.array([True, False]),
    ]
    for array, tensor in zip(arrays, device.upload(*arrays), strict=True):
        assert tensor.device.type == device.ops.device.type
        assert tensor.shape == array.shape
        np.testing.assert_array_equal(tensor.cpu().numpy(), array, strict=True)


def test_tensors_are_brought_to_the_host(device: Device) -> None:
    here = [
        torch.arange(5, dtype=torch.int32, device=device.ops.device),
        torch.linspace(0, 1, 6, device=device.ops.device).view(2, 3),
        torch.zeros((0, 4), device=device.ops.device),
    ]
    several = [device.download(*here) for _ in range(3)]
    for download in several:
        for tensor, array in zip(here, download.wait(), strict=True):
            np.testing.assert_array_equal(tensor.cpu().numpy(), array, strict=True)


def test_many_uploads_leave_those_before_them_alone(device: Device) -> None:
    sent = [device.upload(np.full(1 << size, size))[0] for size in range(12)]
    for size, tensor in enumerate(sent):
        assert tensor.cpu().tolist() == [size] * (1 << size)


def test_the_cpu_uploads_without_a_copy() -> None:
    array = np.arange(5)
    [tensor] = CpuDevice(torch.float32, threads=1).upload(array)
    assert tensor.data_ptr() == array.ctypes.data


def test_what_is_copied_in_has_the_models_type(device: Device) -> None:
    host = torch.randn(3, 5, dtype=torch.bfloat16)
    here = device.copy_in(host)
    assert (here.dtype, here.device.type) == (torch.float32, device.ops.device.type)
    assert torch.equal(here.cpu(), host.float())


@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("size", [64, 8, 20])
def test_a_block_takes_the_bytes_that_are_allocated(block_size: int, size: int) -> None:
    ops = CpuDevice(torch.bfloat16, threads=1, block_size=block_size).ops
    spec = KVSpec(2, size, size, torch.bfloat16)
    few, many = (_storage_bytes(ops.alloc_kv(spec, count).k) for count in (1, 11))
    assert ops.block_bytes(spec) == (many - few) // 10


def _storage_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def test_memory_is_seen(device: Device) -> None:
    found = device.memory()
    assert 0 < found.free <= found.total
    assert 0 < device.cache_budget(None, 1, 0).nbytes <= found.total
    assert device.cache_budget(None, 1, 1 << 60).nbytes == 0
