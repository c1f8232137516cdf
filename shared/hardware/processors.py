"""How many threads should compute on this machine: one for each physical core that the process may use, within
the quota of its control group.

Nothing but the standard library is needed here. Files that are missing or unreadable, as some are in containers,
limit nothing.
"""

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_CPUS = Path("sys/devices/system/cpu")
_GROUPS = Path("sys/fs/cgroup")
# The CPUs of one core, in the file's name of newer and of older kernels.
_SIBLINGS = ("core_cpus_list", "thread_siblings_list")


@dataclass(frozen=True)
class Processors:
    """What a process may compute with.

    `cpus`: logical CPUs; `cores`: physical ones among them, fast and slow alike, hyper-threads of one core counted
    once; `quota`: CPUs whose time the control group may use, None where there is no limit.
    """

    cpus: int
    cores: int
    quota: float | None = None

    @cached_property
    def threads(self) -> int:
        """How many should compute, at least 1.

        Of a quota whole CPUs are taken. With a thread more it would be used up before each period of the kernel
        (100 ms) ends, and every thread of the group, those too that pass on tokens and answer health checks, would be
        throttled for the rest of it.
        """
        if self.quota is None:
            return self.cores
        return max(1, min(self.cores, int(self.quota)))

    def __str__(self) -> str:
        """Such as "8 CPUs, 4 cores, 1 used within a quota of 1.5"."""
        text = f"{_count(self.cpus, 'CPU')}, {_count(self.cores, 'core')}"
        if self.quota is None or self.threads == self.cores <= self.quota:
            return text
        return f"{text}, {self.threads} used within a quota of {self.quota:g}"


def find(root: Path = Path("/"), allowed: Collection[int] | None = None) -> Processors:
    """What this process has. `root`: where `proc` and `sys` are; `allowed`: numbers of the CPUs that it may run on,
    those of its affinity mask, which lie within its cpuset, unless given.
    """
    cpus = set(os.sched_getaffinity(0) if allowed is None else allowed)
    cores = {_core(root / _CPUS / f"cpu{number}" / "topology", number) for number in cpus}
    return Processors(len(cpus), len(cores), min(_quotas(root), default=None))


def threads() -> int:
    """How many should compute in this process if it is the only one that does."""
    return find().threads


def shares(
    count: int, root: Path = Path("/"), allowed: Collection[int] | None = None
) -> list[tuple[int, ...]]:
    """The CPUs of each of `count` processes that compute at the same time: equal numbers of cores, those of a socket
    together. Empty if there are fewer than two cores for each; `root` and `allowed` as for `find`.
    """
    cpus = sorted(os.sched_getaffinity(0) if allowed is None else allowed)
    cores: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for number in cpus:
        topology = root / _CPUS / f"cpu{number}" / "topology"
        socket = _read(topology / "physical_package_id")
        cores.setdefault((socket, _core(topology, number)), []).append(number)
    each = len(cores) // count
    if each < 2:
        return []
    ordered = sorted(cores.items(), key=lambda item: (item[0][0], item[1]))
    parts = [ordered[first : first + each] for first in range(0, each * count, each)]
    return [tuple(number for _, found in part for number in found) for part in parts]


def _core(topology: Path, number: int) -> tuple[str, ...]:
    """The name of a CPU's core; without a file that gives it, each CPU is its own core."""
    for name in _SIBLINGS:
        if siblings := _read(topology / name):
            return ("siblings", siblings)
    package, core = (_read(topology / name) for name in ("physical_package_id", "core_id"))
    if core and core != "-1":
        return ("core", package, core)
    return ("cpu", str(number))


def _quotas(root: Path) -> Iterator[float]:
    """Of the process's control group and of each above it that can be seen from here, in CPUs."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:  # version 2
            for folder in _upwards(root, ("", "unified"), path):
                quota, _, period = _read(folder / "cpu.max").partition(" ")
                yield from _quota(quota, period)
        elif "cpu" in controllers.split(","):
            for folder in _upwards(root, (controllers, "cpu"), path):
                quota, period = (
                    _read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")
                )
                yield from _quota(quota, period)


def _upwards(root: Path, mounts: Collection[str], path: str) -> Iterator[Path]:
    """Folders of a control group and of those above it, wherever its kind is mounted.

    In a container the path may be that of the host, of which only the root, the container's own, is there.
    """
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for mount in mounts:
        for depth in range(len(parts), -1, -1):
            yield root.joinpath(_GROUPS, mount, *parts[:depth])


def _quota(quota_us: str, period_us: str) -> Iterator[float]:
    """In CPUs; nothing for "max" and -1, which are no limit."""
    if quota_us.isdigit() and period_us.isdigit() and int(period_us) > 0:
        yield int(quota_us) / int(period_us)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
