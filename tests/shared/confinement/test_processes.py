"""Confined processes that break, that are ended from outside, or that cannot be had."""

import json
import os
import resource
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shared.confinement import process
from shared.confinement.processes import ConfinedProcesses
from shared.confinement.work import JobLimit, Work
from shared.errors import Unavailable

WORK = Work("tests.support.processes.broken_worker", "jobs", "JOB_PROCESS", 64 << 20, 5, 1 << 20)
FINE = {"do": "say", "head": json.dumps({"last": False, "processor_s": 0}).encode()}


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[ConfinedProcesses]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))
    with ConfinedProcesses(WORK) as made:
        yield made


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        b"5",
        b"{}",
        b"[" * 100_000,
        b'{"last": false}',
        b'{"processor_s": 0}',
        b'{"last": false, "processor_s": "much"}',
        b'{"last": false, "processor_s": NaN}',
        b'{"last": false, "processor_s": null}',
    ],
    ids=lambda head: head[:40].decode("latin-1"),
)
def test_an_answer_that_is_none_costs_its_job(processes: ConfinedProcesses, head: bytes) -> None:
    with pytest.raises(JobLimit, match="broke its process"):
        processes.ask({"do": "say", "head": head})
    assert processes.pids == []


@pytest.mark.parametrize("lengths", [(1 << 31, 0), (0, 1 << 31), ((1 << 20) - 9, 10)])
def test_an_answer_that_is_too_long_is_not_received(
    processes: ConfinedProcesses, lengths: tuple[int, int]
) -> None:
    with pytest.raises(JobLimit, match="gave more than 1 MB"):
        processes.ask({"do": "announce", "lengths": lengths})
    assert processes.ask(FINE)


def test_an_answer_in_small_pieces_has_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))
    work = Work(WORK.module, WORK.what, WORK.reason, 64 << 20, 5, 1 << 20, real_s=1)
    with (
        ConfinedProcesses(work) as processes,
        pytest.raises(JobLimit, match="took over 1 s") as caught,
    ):
        processes.ask({"do": "drip"})
    assert caught.value.is_time


def test_one_that_hangs_up_and_goes_on_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))
    with ConfinedProcesses(replace(WORK, end_s=1.0)) as processes:
        processes.ask(FINE)
        (pid,) = processes.pids
        with pytest.raises(JobLimit, match="broke its process"):
            processes.ask({"do": "hang up"})
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("seen", [True, False])
def test_processes_that_were_killed_while_they_waited_cost_nothing(
    processes: ConfinedProcesses, seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is seen that they have ended, or only when they are asked."""
    taken = [processes._take(fresh=False) for _ in range(3)]
    for one in taken:
        processes._give_back(one, keep=True)
    for pid in (killed := processes.pids):
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    if not seen:
        monkeypatch.setattr(process.Process, "has_ended", False)
    assert processes.ask(FINE)
    if seen:
        assert len(processes.pids) == 1 and not set(processes.pids) & set(killed)


@pytest.mark.parametrize("free", [0, 2, 4])
def test_without_files_to_open_none_is_had_and_nothing_is_kept_open(
    processes: ConfinedProcesses, free: int
) -> None:
    """For the pair of sockets, for what Popen opens, and for what it opens next."""

    def number_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = number_open()
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    filling: list[int] = []
    raised: Any = None
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, limits[1]))
    try:
        while True:
            try:
                filling.append(os.dup(0))
            except OSError:
                break
        for number in filling[len(filling) - free :]:
            os.close(number)
        del filling[len(filling) - free :]
        try:
            processes.ask(FINE)
        except Exception as error:
            raised = error
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for number in filling:
            os.close(number)
    assert isinstance(raised, Unavailable) and raised.reason == "JOB_PROCESS"
    assert number_open() == before
    assert processes.ask(FINE)
