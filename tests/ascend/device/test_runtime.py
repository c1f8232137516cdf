"""Memory, streams and copies of the simulated device, as torch_npu sees them."""

import gc
import os

import pytest
import torch
from torch_npu import npu

from tests.ascend.simulator import faults
from tests.ascend.simulator.counters import counted, counts, fault_found, synchronisations
from tests.ascend.simulator.errors import Refused

MIB = 1 << 20


def test_memory_is_counted_and_comes_back() -> None:
    gc.collect()
    npu.empty_cache()
    free, total = npu.mem_get_info()
    assert total == int(os.environ["FAKE_NPU_BYTES"])
    npu.reset_peak_memory_stats()
    tensor = torch.empty(100 * MIB, dtype=torch.uint8, device="npu")
    assert npu.memory_stats()["allocated_bytes.all.peak"] >= 100 * MIB
    assert free - npu.mem_get_info()[0] >= 100 * MIB
    del tensor
    npu.empty_cache()
    assert npu.mem_get_info()[0] == free


def test_new_memory_is_not_zero() -> None:
    npu.empty_cache()
    assert torch.empty(8 * MIB, dtype=torch.uint8, device="npu")[-1].item() == 0xCB


def test_more_than_there_is_runs_out_of_memory() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(npu.mem_get_info()[1] + 1, dtype=torch.uint8, device="npu")


def test_an_allocation_fails_where_planted_and_the_next_works() -> None:
    npu.empty_cache()
    # torch_npu frees what it has cached and tries again, so two calls make one failure.
    faults.plant(malloc_in=2, malloc_failures=2)
    first = torch.empty(15 * MIB, dtype=torch.uint8, device="npu")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(40 * MIB, dtype=torch.uint8, device="npu")
    second = torch.empty(40 * MIB, dtype=torch.uint8, device="npu")
    assert first.data_ptr() != second.data_ptr()


def test_a_copy_to_the_host_arrives_when_it_is_waited_for() -> None:
    values = torch.arange(8.0)
    host = torch.zeros(8, pin_memory=True)
    device = values.to("npu")
    with counted() as cost:
        host.copy_(device, non_blocking=True)
        event = npu.Event()
        event.record()
    assert synchronisations(cost) == 0
    assert cost["copy_d2h"] == 1
    assert not torch.equal(host, values)
    device.zero_()  # comes after the copy on the stream
    event.synchronize()
    assert torch.equal(host, values)


def test_waiting_for_another_stream_brings_only_what_it_waited_for() -> None:
    host = torch.zeros(8, pin_memory=True)
    side = npu.Stream()
    host.copy_(torch.ones(8, device="npu"), non_blocking=True)
    side.synchronize()
    assert not torch.equal(host, torch.ones(8))
    side.wait_stream(npu.current_stream())
    side.synchronize()
    assert torch.equal(host, torch.ones(8))


@pytest.mark.finds_faults
def test_host_memory_that_changes_under_a_copy_is_reported() -> None:
    host = torch.ones(8).pin_memory()
    device = host.to("npu", non_blocking=True)
    host.zero_()
    npu.synchronize()
    assert "changed while its copy" in fault_found()
    assert torch.equal(device.cpu(), torch.ones(8))


def copied_aside(side: npu.Stream, x: torch.Tensor) -> torch.Tensor:
    """What a copy to the host on another stream brings."""
    host = torch.zeros(x.shape, dtype=x.dtype, pin_memory=True)
    with npu.stream(side):
        host.copy_(x, non_blocking=True)
    return host


def test_a_copy_of_another_stream_is_late_where_nobody_waits_for_it() -> None:
    """Both ways: what is written meanwhile is copied, and what it brings is not there yet."""
    side, steps = npu.Stream(), npu.current_stream()
    x = torch.ones(8, device="npu")
    side.wait_stream(steps)
    host = copied_aside(side, x)
    steps.wait_stream(side)
    x.zero_()
    side.synchronize()
    assert host.tolist() == [1] * 8
    with npu.stream(side):
        side.wait_stream(steps)
        x.copy_(torch.ones(8).pin_memory(), non_blocking=True)
    steps.wait_stream(side)
    assert (x + 0).tolist() == [1] * 8


@pytest.mark.finds_faults
def test_streams_that_use_memory_in_no_order_are_reported() -> None:
    side, steps = npu.Stream(), npu.current_stream()
    x = torch.ones(8, device="npu")
    host = copied_aside(side, x)
    with pytest.raises(Refused, match=r"reads 32 bytes .* writes, in no order"):
        x + 1
    npu.synchronize()
    assert host.tolist() == [1] * 8
    host = copied_aside(side, x)  # the host has waited for all before
    with pytest.raises(Refused, match=r"writes 32 bytes .* reads, in no order"):
        x.zero_()
    side.synchronize()
    assert not host.any()  # the copy was late
    with npu.stream(side):
        x.copy_(torch.ones(8).pin_memory(), non_blocking=True)
    with pytest.raises(Refused, match="in no order"):
        x + 1
    steps.wait_stream(side)
    assert (x + 1).tolist() == [2] * 8
    with npu.stream(side):
        y = x * 3
    before = counts()["unordered"]
    y.cpu()  # which waits for the current stream alone
    assert counts()["unordered"] == before + 1


def test_streams_that_only_read_need_no_order() -> None:
    side, x = npu.Stream(), torch.ones(8, device="npu")
    npu.synchronize()
    with npu.stream(side):
        y = x + 1
    assert (x + 2).tolist() == [3] * 8
    side.synchronize()
    assert y.tolist() == [2] * 8


@pytest.mark.finds_faults
def test_only_pinned_memory_is_copied_without_waiting() -> None:
    with counted() as pageable:
        torch.ones(8).to("npu", non_blocking=True)
    with counted() as pinned:
        torch.ones(8).pin_memory().to("npu", non_blocking=True)
    assert synchronisations(pageable) == pageable["copy_h2d_pageable"] == 1
    assert synchronisations(pinned) == 0
    assert (pinned["copy_h2d"], pinned["bytes_h2d"]) == (1, 32)


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x[x > 2],
        lambda x: x.tolist(),
        lambda x: x.cpu(),
    ],
)
def test_reading_a_value_waits(wait: object) -> None:
    device = torch.arange(8.0).to("npu")
    with counted() as cost:
        wait(device)  # type: ignore[operator]
    assert synchronisations(cost) == 1


def test_a_lost_device_answers_nothing() -> None:
    device = torch.ones(8).to("npu")
    faults.plant(lost=1)
    with pytest.raises(RuntimeError, match="507010"):
        device + 1
    with pytest.raises(RuntimeError):
        device.cpu()
