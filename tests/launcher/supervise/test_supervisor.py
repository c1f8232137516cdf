"""Real processes die, hang and refuse to start; the supervisor does what a user expects of it."""

import asyncio
import contextlib
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs

from services.launcher.supervise import prewarmed_process
from services.launcher.supervise.process import Program
from services.launcher.supervise.supervised_process import GaveUp
from services.launcher.supervise.supervisor import Supervisor
from services.launcher.supervise.timings import Timings
from shared.settings import child_environment
from tests.support.processes.program import ProgramMaker, make_program
from tests.support.processes.supervision import Record, alive, running, until_replaced


async def test_a_killed_process_is_started_again(program: ProgramMaker, record: Record) -> None:
    process = record.supervised(program("decoder"))
    async with running(Supervisor([[process]])):
        first = process.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until_replaced(process, first)
        assert not alive(first)
        second = process.pid
        assert alive(second)
    assert not alive(second)
    states = record.of("decoder")
    assert states.index("restarting") > states.index("ready")
    assert states[-1] == "stopped"


async def test_a_program_with_a_pause_starts_again_after_it_and_stops_during_it(
    program: ProgramMaker, record: Record
) -> None:
    process = record.supervised(replace(program("decoder"), pause_s=600.0))
    with capture_logs() as logs:
        async with running(Supervisor([[process]])):
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            async with asyncio.timeout(60):
                while not any("starting it again" in line["event"] for line in logs):
                    await asyncio.sleep(0.01)
    assert logs[0]["after_s"] == 600.0
    assert record.of("decoder").count("starting") == 1
    assert record.of("decoder")[-1] == "stopped"


async def test_what_never_comes_up_is_given_up_with_its_last_lines(
    program: ProgramMaker, record: Record
) -> None:
    healthy = record.supervised(program("redis"))
    broken = record.supervised(
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
    broken = record.supervised(program("decoder", "print('--dtype: no such'); raise SystemExit(2)"))
    supervisor = Supervisor([[broken]])
    await supervisor.start()
    with pytest.raises(GaveUp):
        await supervisor.all_ready()
    await supervisor.stop()
    assert broken.crashes == 1


async def test_stages_end_in_order(program: ProgramMaker, record: Record) -> None:
    gateway, decoder, redis = (
        record.supervised(program(n)) for n in ("gateway", "decoder", "redis")
    )
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
    processes = [record.supervised(program("gateway", busy)), record.supervised(program("decoder"))]
    async with running(Supervisor([[processes[0]], [processes[1]]], drain_s=30)):
        pass
    assert done.exists()


async def test_a_process_that_will_not_end_is_killed(program: ProgramMaker, record: Record) -> None:
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); ready(); time.sleep(600)"
    process = record.supervised(program("decoder", stubborn))
    async with running(Supervisor([[process]])):
        pid = process.pid
    assert not alive(pid)


async def test_an_impatient_user_need_not_wait(program: ProgramMaker, record: Record) -> None:
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); ready(); time.sleep(600)"
    processes = [record.supervised(program(name, stubborn)) for name in ("gateway", "decoder")]
    supervisor = Supervisor([[processes[0]], [processes[1]]])
    await supervisor.start()
    await supervisor.all_ready()
    pids = [process.pid for process in processes]
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
    process = record.supervised(program("preprocess", source))
    async with running(Supervisor([[process]])):
        pid = process.pid
        assert pid is not None
        await record.said("all said")
        started = psutil.Process(int(record.lines[0].split()[-1]))
        os.kill(pid, signal.SIGKILL)
        await until_replaced(process, pid)
        with contextlib.suppress(psutil.NoSuchProcess):
            async with asyncio.timeout(60):
                while started.status() != psutil.STATUS_ZOMBIE:
                    await asyncio.sleep(0.05)


async def test_a_prewarmed_process_replaces_one_that_has_ended(
    record: Record, tmp_path: Path
) -> None:
    service = tmp_path / "servicelike"
    service.mkdir()
    (service / "__init__.py").touch()
    (service / "heavy.py").write_text(
        f"import os, pathlib\npathlib.Path({str(tmp_path)!r}, f'imported-{{os.getpid()}}').touch()\n"
    )
    (service / "__main__.py").write_text(
        "import os, pathlib, sys, time, servicelike.heavy\n"
        "print('at work', os.getpid(), sys.stdin.read(), flush=True)\n"
        f"pathlib.Path({str(tmp_path / 'decoder.ready')!r}).touch()\n"
        "time.sleep(600)\n"
    )

    def imported() -> set[int]:
        return {int(path.name.partition("-")[2]) for path in tmp_path.glob("imported-*")}

    program = Program(
        "decoder",
        [sys.executable, "-m", "servicelike"],
        child_environment(PYTHONPATH=str(tmp_path)),
        make_program(tmp_path, "decoder").probe,
        prewarm_command=[sys.executable, prewarmed_process.__file__, "servicelike"],
    )
    process = record.supervised(program, Timings(prewarm_after_s=0.0))
    async with running(Supervisor([[process]])):
        first = process.pid
        assert first is not None
        async with asyncio.timeout(60):
            while len(imported()) < 2:
                await asyncio.sleep(0.02)
        (prewarmed,) = imported() - {first}
        assert alive(prewarmed)
        await asyncio.sleep(0.2)  # it says so after its imports
        await record.said(f"at work {first}")
        assert len(record.lines) == 1  # and the prewarmed has done nothing yet
        (tmp_path / "decoder.ready").unlink()
        os.kill(first, signal.SIGKILL)
        await until_replaced(process, first)
        assert process.pid == prewarmed
        await record.said(f"at work {prewarmed}")
        async with asyncio.timeout(60):
            while len(imported()) < 3:
                await asyncio.sleep(0.02)
    assert not any(map(alive, imported()))


async def test_very_long_lines_do_not_stop_the_reading(
    program: ProgramMaker, record: Record
) -> None:
    source = (
        "import time; print('x' * 3_000_000); print('after', flush=True); ready(); time.sleep(9)"
    )
    async with running(Supervisor([[record.supervised(program("gateway", source))]])):
        await record.said("after")
