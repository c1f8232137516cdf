"""A full disk stops the queue's own writes, and nothing else: what dies meanwhile is started again."""

import asyncio
import json
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import structlog.testing

from services.launcher.supervise.process_table import ProcessTable, waiting
from services.launcher.supervise.process_table import System as TableContent
from tests.support.processes.system import System
from tests.support.waiting import until

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own at the folder. Skips the test where none can be mounted."""
    options = f"size={size},mode=0700"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("only root mounts file systems")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Takes all that is left; the file that does."""
    file = folder / "filler"
    with suppress(OSError), file.open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    return file


def ask(system: System) -> str:
    """The answer to a short question."""
    body = {"model": "tessera-demo", "messages": [{"role": "user", "content": "Hello!"}]}
    request = urllib.request.Request(
        f"{system.base_url}/chat/completions",
        json.dumps({**body, "max_tokens": 8, "temperature": 0}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return str(json.load(reply)["choices"][0]["message"]["content"])


def answers(url: str) -> bool:
    """Whether there is a page at the address."""
    with suppress(OSError), urllib.request.urlopen(url, timeout=10) as reply:
        return bool(reply.status == 200)
    return False


def takes_requests(system: System) -> bool:
    try:
        ask(system)
    except urllib.error.HTTPError as error:
        assert error.code == 503, error
        return False
    return True


def test_a_crash_on_a_full_disk_does_not_end_the_system() -> None:
    system = System(None, "--language-model-only")
    # Its queue, its list of processes and its log.
    with small_disk(system.folder, "24m"), system:
        before = ask(system)
        filler = fill(system.folder)
        launcher = psutil.Process(system.pid)
        for service in ("decoder", "gateway"):
            killed = system.kill(service)
            until(lambda s=service, k=killed: system.pids().get(s, [k]) != [k], f"a new {service}")  # type: ignore[misc]
        assert launcher.is_running() and launcher.status() != psutil.STATUS_ZOMBIE
        until(lambda: answers(f"{system.url}/health/live"), "a gateway that answers")
        filler.unlink()
        until(system.ready, "to be ready again")
        until(lambda: takes_requests(system), "Redis to have noticed that there is space")
        assert ask(system) == before
        assert system.stop() == 0


async def test_the_list_of_processes_is_written_again_when_there_is_space(short_tmp: Path) -> None:
    with small_disk(short_tmp, "64k"):
        content = TableContent("m", [], "unix:///r.sock", entries=waiting([("decoder", "decoder")]))
        with (
            structlog.testing.capture_logs() as lines,
            ProcessTable(short_tmp, content) as process_table,
        ):
            filler = fill(short_tmp)
            for crashes in range(3):
                process_table.update("decoder", "restarting", 1, crashes)
            assert [line["log_level"] for line in lines] == ["warning"]
            process_table.update("decoder", "ready", 2, 3)
            filler.unlink()
            # Nothing else has to happen for it.
            while json.loads((short_tmp / "processes.json").read_text())["entries"][0]["pid"] != 2:
                await asyncio.sleep(0.05)
            assert (short_tmp / "processes.json").stat().st_mode & 0o777 == 0o600
        assert not (short_tmp / "processes.json").exists()
