"""A process that hangs is killed; one that needs longer for an answer, since it computes or is starved, is not."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from services.launcher.supervise.probe import HeartbeatProbe
from services.launcher.supervise.process import Program
from services.launcher.supervise.supervised_process import SupervisedProcess
from services.launcher.supervise.supervisor import Supervisor
from services.launcher.supervise.timings import Timings
from shared.settings import child_environment
from tests.support.processes.program import ProgramMaker
from tests.support.processes.supervision import Record, alive, running, until_replaced

SOON = Timings(answer_s=0.5, late_answer_s=0.5, silence_s=1.5, grace_s=0.0)

# A process whose event loop takes a third of a second for an iteration, until a file's content says what it does then.
PROCESS = """
import asyncio, sys, time
from pathlib import Path
from shared.net.heartbeat import Heartbeat

async def main():
    Heartbeat(Path(sys.argv[1]), lambda: True).start()
    told = Path(sys.argv[1] + ".told")
    while True:
        time.sleep(0.3)
        await asyncio.sleep(0)
        what = told.read_text() if told.exists() else ""
        told.unlink(missing_ok=True)
        if what == "sleep":
            time.sleep(600)
        elif what:
            until = time.process_time() + float(what)
            while time.process_time() < until:
                sum(range(30_000_000))  # which keeps the interpreter from other threads, as collecting garbage does
            print("has computed", flush=True)

asyncio.run(main())
"""


class Told:
    """Such a process, supervised."""

    def __init__(self, process: SupervisedProcess, file: Path) -> None:
        self._process, self._file = process, file
        self.pid = process.pid

    def do(self, what: str) -> None:
        """It sleeps, or computes for so many seconds of processor time, on its event loop."""
        draft = self._file.with_suffix(".draft")
        draft.write_text(what)
        draft.rename(self._file)

    async def until_replaced(self) -> None:
        await until_replaced(self._process, self.pid)
        assert not alive(self.pid)


@contextlib.asynccontextmanager
async def told(record: Record, folder: Path, timings: Timings = SOON) -> AsyncIterator[Told]:
    beat = folder / "beat"
    process = record.supervised(
        Program(
            "gateway",
            [sys.executable, "-c", PROCESS, str(beat)],
            child_environment(PYTHONPATH=str(Path(__file__).parents[3])),
            HeartbeatProbe(beat),
        ),
        timings,
    )
    async with running(Supervisor([[process]])):
        yield Told(process, Path(f"{beat}.told"))


async def test_a_process_that_computes_and_does_not_answer_is_kept_and_a_stopped_one_killed(
    record: Record, short_tmp: Path
) -> None:
    with capture_logs() as logs:
        async with told(record, short_tmp) as process:
            process.do("3")
            await record.said("has computed")
            assert alive(process.pid) and process.pid is not None
            os.kill(process.pid, signal.SIGSTOP)
            await process.until_replaced()
    said = [line["event"] for line in logs]
    assert "gateway does not answer; its threads are at work, so it is left alone" in said
    assert said.count("gateway hangs, killing it") == 1


@pytest.mark.full
async def test_a_process_whose_event_loop_is_blocked_is_killed(
    record: Record, short_tmp: Path
) -> None:
    async with told(record, short_tmp) as process:
        process.do("sleep")
        await process.until_replaced()


@pytest.mark.full
async def test_a_process_that_computes_on_its_event_loop_without_end_is_killed(
    record: Record, short_tmp: Path
) -> None:
    with capture_logs() as logs:
        async with told(record, short_tmp, replace(SOON, computed_s=3.0)) as process:
            process.do("600")
            await process.until_replaced()
    causes = [line["cause"] for line in logs if line["event"] == "gateway hangs, killing it"]
    assert causes == ["a thread has computed for 3 s and it has not answered"]


@pytest.mark.full
async def test_a_process_that_hangs_again_has_longer_and_starts_later(
    program: ProgramMaker, record: Record, tmp_path: Path
) -> None:
    silent = tmp_path / "encoder.silent"
    hanging = f"""
import time
silent = Path({str(silent)!r})
silent.unlink(missing_ok=True)
ready()
time.sleep(1)
silent.touch()
time.sleep(600)
"""
    process = record.supervised(program("encoder", hanging), replace(SOON, silence_s=0.5))
    with capture_logs() as logs:
        async with running(Supervisor([[process]])), asyncio.timeout(60):
            while process.crashes < 2 or not process.ready.is_set():
                await asyncio.sleep(0.05)
    limits = [line["cause"].split()[-2] for line in logs if "cause" in line]
    assert limits[:2] == ["0.5", "1"]
    assert [line["after_s"] for line in logs if "after_s" in line][:2] == [0.0, 0.2]


async def test_silence_does_not_count_directly_after_a_process_is_ready(
    program: ProgramMaker, record: Record, tmp_path: Path
) -> None:
    timings = replace(SOON, silence_s=0.2, grace_s=600.0)
    process = record.supervised(program("encoder"), timings)
    async with running(Supervisor([[process]])):
        first = process.pid
        (tmp_path / "encoder.silent").touch()
        await asyncio.sleep(3)
        assert alive(first)
