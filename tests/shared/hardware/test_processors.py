"""How many threads compute: cores of the cpuset within the quota, read from trees of files as kernels show them."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from shared.hardware import processors
from shared.hardware.processors import Processors

_V2 = "0::/user/room\n"
_V1 = "3:cpu,cpuacct:/docker/room\n2:memory:/docker/room\n0::/\n"
_V1_ROOM = {"cpu,cpuacct/docker/room/cpu.cfs_quota_us": "250000"}
# Such as a kernel numbers two hyper-threads of each of four cores.
_SMT = {number: f"{number % 4},{number % 4 + 4}" for number in range(8)}


def _tree(
    root: Path,
    siblings: Mapping[int, str] | None = None,
    groups: str = _V2,
    limits: Mapping[str, str] | None = None,
) -> Path:
    """`siblings`: the CPUs of each CPU's core; `groups`: /proc/self/cgroup; `limits`: files of control groups."""
    files = {"proc/self/cgroup": groups}
    for number, together in (siblings or {}).items():
        files[f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list"] = together + "\n"
    for name, content in (limits or {}).items():
        files[f"sys/fs/cgroup/{name}"] = content + "\n"
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def test_two_plain_cores(tmp_path: Path) -> None:
    found = processors.find(_tree(tmp_path, {0: "0", 1: "1"}), {0, 1})
    assert found == Processors(cpus=2, cores=2, quota=None)
    assert found.threads == 2
    assert str(found) == "2 CPUs, 2 cores"


@pytest.mark.parametrize(
    ("allowed", "cores"),
    [
        (range(8), 4),
        ({0, 1, 4, 5}, 2),  # half of the cores
        ({0, 1, 2, 3}, 4),  # half of each core
        ({1, 5}, 1),  # both threads of one
    ],
)
def test_hyper_threads_of_a_core_count_once(tmp_path: Path, allowed: set[int], cores: int) -> None:
    found = processors.find(_tree(tmp_path, _SMT), allowed)
    assert (found.cpus, found.cores, found.threads) == (len(allowed), cores, cores)


def test_cores_by_their_numbers_where_no_siblings_are_listed(tmp_path: Path) -> None:
    for number, (package, core) in enumerate([("0", "0"), ("0", "0"), ("0", "1"), ("1", "0")]):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{number}/topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(package)
        (folder / "core_id").write_text(core)
    assert processors.find(tmp_path, range(4)).cores == 3


def test_where_nothing_is_readable_each_cpu_is_a_core(tmp_path: Path) -> None:
    assert processors.find(tmp_path, {2, 3, 7}) == Processors(cpus=3, cores=3, quota=None)


@pytest.mark.parametrize(
    ("groups", "limits", "quota", "threads"),
    [
        (_V2, {"user/room/cpu.max": "150000 100000"}, 1.5, 1),
        (_V2, {"user/room/cpu.max": "50000 100000"}, 0.5, 1),
        (_V2, {"user/room/cpu.max": "300000 100000"}, 3, 3),
        (_V2, {"user/room/cpu.max": "900000 100000"}, 9, 4),
        (_V2, {"user/room/cpu.max": "max 100000"}, None, 4),
        (_V2, {"user/cpu.max": "200000 100000", "user/room/cpu.max": "max 100000"}, 2, 2),
        (_V2, {"cpu.max": "200000 100000"}, 2, 2),  # a container's own, seen as the root
        (_V2, {"unified/user/room/cpu.max": "200000 100000"}, 2, 2),
        ("0::/../other\n", {"cpu.max": "200000 100000"}, 2, 2),
        (_V1, _V1_ROOM, None, 4),
        (_V1, {**_V1_ROOM, "cpu,cpuacct/docker/room/cpu.cfs_period_us": "100000"}, 2.5, 2),
        (_V1, {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "50000"}, 2, 2),
        (_V1, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None, 4),
        (_V2, {"user/room/cpu.max": "no numbers"}, None, 4),
    ],
)
def test_a_quota_limits(
    tmp_path: Path, groups: str, limits: Mapping[str, str], quota: float | None, threads: int
) -> None:
    found = processors.find(_tree(tmp_path, _SMT, groups, limits), range(8))
    assert (found.cores, found.quota, found.threads) == (4, quota, threads)


def test_a_quota_is_shown() -> None:
    assert str(Processors(8, 4, 1.5)) == "8 CPUs, 4 cores, 1 used within a quota of 1.5"
    assert str(Processors(2, 1, 0.5)) == "2 CPUs, 1 core, 1 used within a quota of 0.5"
    assert str(Processors(8, 4, 6.0)) == "8 CPUs, 4 cores"


def test_the_processors_of_this_process() -> None:
    allowed = os.sched_getaffinity(0)
    one = min(allowed)
    os.sched_setaffinity(0, {one})
    try:
        assert (processors.find().cpus, processors.threads()) == (1, 1)
    finally:
        os.sched_setaffinity(0, allowed)


def test_processes_share_cores_by_sockets(tmp_path: Path) -> None:
    """Two sockets whose cores are numbered in turn, with two hyper-threads each."""
    _tree(tmp_path, {number: f"{number % 8},{number % 8 + 8}" for number in range(16)})
    for number in range(16):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{number}/topology"
        (folder / "physical_package_id").write_text(f"{number % 2}\n")
    found = processors.shares(2, tmp_path, range(16))
    assert [sorted(cpus) for cpus in found] == [list(range(0, 16, 2)), list(range(1, 16, 2))]
    quarters = processors.shares(4, tmp_path, range(16))
    assert sorted(number for cpus in quarters for number in cpus) == list(range(16))
    assert all(len(cpus) == 4 and len({number % 2 for number in cpus}) == 1 for cpus in quarters)
    # A core for each is no share: other services compute too.
    assert processors.shares(8, tmp_path, range(16)) == []
