"""A `tessera serve` of our own, for the time of a run."""

import contextlib
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.kill.full_disk import small_disk
from benchmarks.load.errors import BenchError
from services.launcher.ports import is_free
from services.launcher.supervise.process_table import read_process_table
from shared.errors import Unavailable

_READY_WITHIN_S = 300.0
_END_WITHIN_S = 15.0
# Below those that the kernel gives to clients, who could otherwise take a gateway's port while it restarts.
_PORTS = range(18_000, 30_000, 200)


@contextlib.contextmanager
def launched(flags: str, on_small_disk: bool = False) -> Iterator[Path]:
    """Its state folder, inside the block; on a small file system of its own if that is to be filled. Raises BenchError,
    with its last lines, if it does not come up.
    """
    folder = Path(tempfile.mkdtemp(prefix="tessera-kill-"))
    log = folder / "log"
    command = [sys.executable, "-m", "services.launcher", "serve", *shlex.split(flags)]
    command += ["--port", str(_free_port()), "--state-dir", str(folder / "state")]
    disk = small_disk(folder / "state") if on_small_disk else contextlib.nullcontext()
    try:
        with disk, log.open("wb") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
            try:
                _wait(process, folder / "state", log)
                yield folder / "state"
            finally:
                _end(process)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _free_port() -> int:
    """A port with free ones above it, for further gateways."""
    for port in random.sample(_PORTS, len(_PORTS)):
        if all(is_free("127.0.0.1", port + offset) for offset in (0, 1, 10, 11)):
            return port
    raise BenchError("no free port")


def _wait(process: subprocess.Popen[bytes], state: Path, log: Path) -> None:
    deadline = time.monotonic() + _READY_WITHIN_S
    while not _is_ready(state):
        if process.poll() is not None or time.monotonic() > deadline:
            tail = log.read_text(errors="replace")[-2000:]
            raise BenchError(f"`tessera serve` did not come up:\n{tail}")
        time.sleep(0.1)


def _is_ready(state: Path) -> bool:
    try:
        entries = read_process_table(state).entries.values()
    except Unavailable:
        return False
    return all(entry.state == "ready" for entry in entries)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_END_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
