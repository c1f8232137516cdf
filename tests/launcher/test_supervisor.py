"""Real processes die, hang and refuse to start; the supervisor does what a user expects of it."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from support.program import ProgramMaker, make_program

from services.launcher.supervise import prewarmed_process
from services.launcher.supervise.probe import HeartbeatProbe
from services.launcher.supervise.process import Program
from services.launcher.supervise.supervised_process import Child, GaveUp
from services.launcher.supervise.supervisor import Supervisor
from shared.settings import child_environment


class Record:
    """What the children reported."""

    def __init__(self) -> None:
        self.states: list[tuple[str, str]] = []
        self.lines: list[str] = []

    def child(self, program: Program) -> Child:
        return Child(
            program,
            on_state=lambda name, state: self.states.append((name, state)),
            on_line=lambda name, line: self.lines.append(f"{name}: {line}"),
        )

    def of(self, name: str) -> list[str]:
        return [state for who, state in self.states if who == name]

    async def said(self, line: str) -> None:
        """Waits until a child's line has been read that ends so: that it is ready may be seen earlier."""
        async with asyncio.timeout(30):
            while not any(one.endswith(line) for one in self.lines):
                await asyncio.sleep(0.01)


@pytest.fixture
def record() -> Record:
    return Record()


@contextlib.asynccontextmanager
async def running(supervisor: Supervisor) -> AsyncIterator[None]:
    await supervisor.start()
    try:
        await supervisor.all_ready()
        yield
    finally:
        await supervisor.stop()


def alive(pid: int | None) -> bool:
    return pid is not None and psutil.pid_exists(pid)


async def until_replaced(child: Child, pid: int | None) -> None:
    async with asyncio.timeout(30):
        while child.pid in (pid, None) or not child.ready.is_set():
            await asyncio.sleep(0.02)


async def test_a_killed_process_is_started_again(program: ProgramMaker, record: Record) -> None:
    child = record.child(program("decoder"))
    async with running(Supervisor([[child]])):
        first = child.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until_replaced(child, first)
        assert not alive(first)
        second = child.pid
        assert alive(second)
    assert not alive(second)
    states = record.of("decoder")
    assert states.index("restarting") > states.index("ready")
    assert states[-1] == "stopped"


async def test_a_process_that_falls_silent_is_killed(
    program: ProgramMaker, record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.launcher.supervise.supervised_process._SILENCE_S", 1.0)
    child = record.child(program("encoder"))
    async with running(Supervisor([[child]])):
        first = child.pid
        (tmp_path / "encoder.silent").touch()
        async with asyncio.timeout(30):
            while alive(first):
                await asyncio.sleep(0.05)
        (tmp_path / "encoder.silent").unlink()
        await until_replaced(child, first)


# A process whose event loop takes a third of a second for a turn, until a file says that it is to stand still.
TURNING = """
import asyncio, sys, time
from pathlib import Path
from shared.net.heartbeat import Heartbeat

async def main():
    Heartbeat(Path(sys.argv[1]), lambda: True).start()
    while not Path(sys.argv[1] + ".still").exists():
        time.sleep(0.3)
        await asyncio.sleep(0)
    time.sleep(600)

asyncio.run(main())
"""


async def test_a_busy_event_loop_is_left_alone_and_one_that_stands_still_is_not(
    record: Record, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.launcher.supervise.supervised_process._SILENCE_S", 2.0)
    beat, still = short_tmp / "beat", short_tmp / "beat.still"
    child = record.child(
        Program(
            "gateway",
            [sys.executable, "-c", TURNING, str(beat)],
            child_environment(PYTHONPATH=str(Path(__file__).parents[2])),
            HeartbeatProbe(beat),
        )
    )
    async with running(Supervisor([[child]])):
        first = child.pid
        await asyncio.sleep(5)
        assert child.pid == first
        still.touch()
        async with asyncio.timeout(60):
            while alive(first):
                await asyncio.sleep(0.05)
        still.unlink()
        await until_replaced(child, first)


async def test_what_never_comes_up_is_given_up_with_its_last_words(
    program: ProgramMaker, record: Record
) -> None:
    healthy = record.child(program("redis"))
    broken = record.child(
        program("decoder", "print('no weights in the folder'); raise SystemExit(1)")
    )
    supervisor = Supervisor([[broken]], foundation=healthy)
    await supervisor.start()
    with pytest.raises(GaveUp) as error:
        await supervisor.all_ready()
    redis_pid = healthy.pid
    await supervisor.stop()
    assert error.value.name == "decoder"
    assert error.value.how == "ended with status 1"
    assert list(error.value.lines) == ["no weights in the folder"] * 5
    assert not alive(redis_pid)


async def test_refused_settings_are_given_up_at_once(program: ProgramMaker, record: Record) -> None:
    broken = record.child(program("decoder", "print('--dtype: no such'); raise SystemExit(2)"))
    supervisor = Supervisor([[broken]])
    await supervisor.start()
    with pytest.raises(GaveUp):
        await supervisor.all_ready()
    await supervisor.stop()
    assert broken.deaths == 1


async def test_stages_end_in_order(program: ProgramMaker, record: Record) -> None:
    gateway, decoder, redis = (record.child(program(n)) for n in ("gateway", "decoder", "redis"))
    async with running(Supervisor([[gateway], [decoder]], foundation=redis)):
        pass
    ended = [name for name, state in record.states if state == "stopped"]
    assert ended == ["gateway", "decoder", "redis"]
    began = [name for name, state in record.states if state == "starting"]
    assert began[0] == "redis"


async def test_open_answers_may_run_on(
    program: ProgramMaker, record: Record, tmp_path: Path
) -> None:
    done = tmp_path / "done"
    busy = (
        "import signal, sys, time\n"
        "from pathlib import Path\n"
        f"def end(*_): time.sleep(2); Path({str(done)!r}).touch(); sys.exit(0)\n"
        "signal.signal(15, end); ready(); time.sleep(600)"
    )
    children = [record.child(program("gateway", busy)), record.child(program("decoder"))]
    async with running(Supervisor([[children[0]], [children[1]]], drain_s=30)):
        pass
    assert done.exists()


async def test_a_process_that_will_not_end_is_killed(program: ProgramMaker, record: Record) -> None:
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); ready(); time.sleep(600)"
    child = record.child(program("decoder", deaf))
    async with running(Supervisor([[child]])):
        pid = child.pid
    assert not alive(pid)


async def test_an_impatient_user_need_not_wait(program: ProgramMaker, record: Record) -> None:
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); ready(); time.sleep(600)"
    children = [record.child(program(name, deaf)) for name in ("gateway", "decoder")]
    supervisor = Supervisor([[children[0]], [children[1]]])
    await supervisor.start()
    await supervisor.all_ready()
    pids = [child.pid for child in children]
    stopping = asyncio.create_task(supervisor.stop())
    async with asyncio.timeout(60):
        while ("gateway", "stopping") not in record.states:
            await asyncio.sleep(0.01)
        supervisor.kill()  # the second Ctrl-C
        await stopping
    assert not any(map(alive, pids))


async def test_what_a_process_started_itself_ends_with_it(
    program: ProgramMaker, record: Record
) -> None:
    source = (
        "import subprocess, time\n"
        "print('started', subprocess.Popen(['sleep', '600']).pid, flush=True)\n"
        "print('all said', flush=True); ready(); time.sleep(600)"
    )
    child = record.child(program("preprocess", source))
    async with running(Supervisor([[child]])):
        pid = child.pid
        assert pid is not None
        await record.said("all said")
        grandchild = psutil.Process(int(record.lines[0].split()[-1]))
        os.kill(pid, signal.SIGKILL)
        await until_replaced(child, pid)
        with contextlib.suppress(psutil.NoSuchProcess):
            assert grandchild.status() == psutil.STATUS_ZOMBIE


async def test_a_spare_process_takes_the_place_of_a_dead_one(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.launcher.supervise.supervised_process._SPARE_AFTER_S", 0.0)
    room = tmp_path / "roomlike"
    room.mkdir()
    (room / "__init__.py").touch()
    (room / "heavy.py").write_text(
        f"import os, pathlib\npathlib.Path({str(tmp_path)!r}, f'imported-{{os.getpid()}}').touch()\n"
    )
    (room / "__main__.py").write_text(
        "import os, pathlib, sys, time, roomlike.heavy\n"
        "print('at work', os.getpid(), sys.stdin.read(), flush=True)\n"
        f"pathlib.Path({str(tmp_path / 'decoder.ready')!r}).touch()\n"
        "time.sleep(600)\n"
    )

    def imported() -> set[int]:
        return {int(path.name.partition("-")[2]) for path in tmp_path.glob("imported-*")}

    program = Program(
        "decoder",
        [sys.executable, "-m", "roomlike"],
        child_environment(PYTHONPATH=str(tmp_path)),
        make_program(tmp_path, "decoder").probe,
        held_command=[sys.executable, prewarmed_process.__file__, "roomlike"],
    )
    child = record.child(program)
    async with running(Supervisor([[child]])):
        first = child.pid
        assert first is not None
        async with asyncio.timeout(30):
            while len(imported()) < 2:
                await asyncio.sleep(0.02)
        (spare,) = imported() - {first}
        assert alive(spare)
        await asyncio.sleep(0.2)  # it says so after its imports
        await record.said(f"at work {first}")
        assert len(record.lines) == 1  # and the spare has done nothing yet
        (tmp_path / "decoder.ready").unlink()
        os.kill(first, signal.SIGKILL)
        await until_replaced(child, first)
        assert child.pid == spare
        await record.said(f"at work {spare}")
        async with asyncio.timeout(30):
            while len(imported()) < 3:
                await asyncio.sleep(0.02)
    assert not any(map(alive, imported()))


async def test_very_long_lines_do_not_stop_the_reading(
    program: ProgramMaker, record: Record
) -> None:
    source = (
        "import time; print('x' * 3_000_000); print('after', flush=True); ready(); time.sleep(9)"
    )
    async with running(Supervisor([[record.child(program("gateway", source))]])):
        await record.said("after")
