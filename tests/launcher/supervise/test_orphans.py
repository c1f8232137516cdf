"""A launcher that is killed outright leaves nothing running."""

import subprocess
import sys
from pathlib import Path

import psutil

from tests.support.waiting import runs, until

LAUNCHER = """
import asyncio, sys
from pathlib import Path
from services.launcher.supervise.supervised_process import SupervisedProcess
from services.launcher.supervise.process import Program
from services.launcher.redis.embedded_redis import EmbeddedRedis
from services.launcher.supervise.probe import RedisProbe
from services.launcher.supervise.supervisor import Supervisor
from shared.settings import child_environment

async def main(folder):
    redis = EmbeddedRedis(folder, folder / "r.sock")
    processes = [
        SupervisedProcess(
            Program(name, command, child_environment(), RedisProbe(redis.socket_path)),
            on_state=lambda *_: None,
            on_line=lambda *_: None,
        )
        for name, command in (("redis", redis.command), ("service", ["sleep", "600"]))
    ]
    supervisor = Supervisor([processes[1:]], foundation=processes[0])
    await supervisor.start()
    await supervisor.all_ready()
    print(*(process.pid for process in processes), flush=True)
    await supervisor.watch()

asyncio.run(main(Path(sys.argv[1])))
"""


def test_processes_end_with_a_killed_launcher(short_tmp: Path) -> None:
    root = Path(__file__).parents[3]
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(short_tmp)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={"PYTHONPATH": f"{root}:{root / 'protos'}", "PATH": "/usr/bin:/bin"},
    )
    with launcher:
        assert launcher.stdout is not None
        pids = [int(word) for word in launcher.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(psutil.pid_exists, pids))
        launcher.kill()
    until(lambda: not any(map(runs, pids)), "their end")
