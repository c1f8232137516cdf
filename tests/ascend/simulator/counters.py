"""What a piece of code cost: synchronisations, copies by kind, allocations, waits, kernels by name."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.ascend.simulator import streams
from tests.ascend.simulator.runtime import Report, counter_names, own_report, report_of

SYNCHRONISATIONS = ("synchronize_stream", "synchronize_event", "synchronize_device")

kernels: Counter[str] = Counter()
"""Calls of this process, by the name of the op."""

fallbacks: Counter[str] = Counter()
"""Calls of ops without a kernel for the NPU, which torch_npu runs on the CPU."""

on_ai_cpu: Counter[str] = Counter()
"""Calls that the device's AI CPUs compute, slowly, by name and dtype, as `sort of int64` (`simulator/ai_cpu.py`)."""


def counts(report: Report | None = None) -> Counter[str]:
    """All counters since the start, of this process or of what a `report_of` gave."""
    if report is None:
        streams.drain()
    values = (own_report() if report is None else report).counter
    return Counter({name: values[i] for i, name in enumerate(counter_names())})


def counts_of(folder: Path, pid: int) -> Counter[str]:
    """The counters of another process (see `report_of`)."""
    return counts(report_of(folder, pid))


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """At the end of the block it holds what the block cost; what did not occur is left out."""
    cost: Counter[str] = Counter()
    before = counts()
    yield cost
    cost.update(counts() - before)


def synchronisations(cost: Counter[str]) -> int:
    """How often the host waited for the device. A blocking copy waits for its stream, so it counts as one."""
    return sum(cost[name] for name in SYNCHRONISATIONS)


def fault_found() -> str:
    """What the runtime found wrong last, such as host memory that changed under a copy; "" for nothing."""
    message: bytes = own_report().message
    return message.decode()
