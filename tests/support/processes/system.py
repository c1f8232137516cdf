"""A whole system as a user has it: `tessera serve` in a process of its own, on free ports."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from services.launcher.state.folders import Folders
from shared.settings import python_path
from tests.support.network.ports import free_ports

_ROOT = Path(__file__).parents[3]


class System:
    """Starts `tessera serve [model] [flags]`, waits until it is ready, kills parts of it, stops it.

    `with System(checkpoint, "--decoders", "2") as system:` has `system.base_url` for an OpenAI
    client, `system.grpc_address` for ChatService, `system.pids()` by service.
    """

    def __init__(
        self,
        model: Path | None = None,
        *flags: str,
        scheme: str = "http",
        ready_within_s: float = 240.0,
        program: Sequence[str] = (sys.executable, "-m", "services.launcher"),
    ) -> None:
        """`model` is a checkpoint folder, the demo model if None; `program` is what `tessera` is."""
        self.port, self.grpc_port = free_ports(2)
        self.folder = Path(tempfile.mkdtemp(prefix="ts-", dir="/tmp"))
        self._model = model
        self._flags = flags
        self._scheme = scheme
        self._program = list(program)
        self._ready_within_s = ready_within_s
        self._process: subprocess.Popen[bytes] | None = None
        self._log = ""

    @property
    def url(self) -> str:
        """Root URL of the REST API."""
        return f"{self._scheme}://127.0.0.1:{self.port}"

    @property
    def base_url(self) -> str:
        """What an OpenAI client is pointed at."""
        return f"{self.url}/v1"

    @property
    def grpc_address(self) -> str:
        """host:port of the gRPC API."""
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def pid(self) -> int:
        """The launcher's."""
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def log(self) -> str:
        """All that it has printed so far; still there after the end."""
        path = self.folder / "log"
        if path.exists():
            self._log = path.read_text(errors="replace")
        return self._log

    def start(self) -> Self:
        """Starts it and waits until the gateway is ready."""
        command = [*self._program, "serve"]
        command += [str(self._model)] if self._model else []
        command += ["--port", str(self.port), "--grpc-port", str(self.grpc_port)]
        command += ["--state-dir", str(self.folder / "state"), *self._flags]
        path = python_path(_ROOT, _ROOT / "protos")
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": path},
            )
        self.wait_ready()
        return self

    def wait_ready(self, within_s: float | None = None) -> None:
        """Returns when all services are ready; fails with the log if that takes too long."""
        deadline = time.monotonic() + (within_s or self._ready_within_s)
        while not self.ready():
            assert self._process is not None
            status = self._process.poll()
            assert status is None, f"tessera serve ended with status {status}:\n{self.log}"
            assert time.monotonic() < deadline, f"not ready in time:\n{self.log}"
            time.sleep(0.05)

    def ready(self) -> bool:
        """Whether the launcher has printed its banner and the gateway answers that it is ready."""
        if not self._is_announced():
            return False
        try:
            with urllib.request.urlopen(f"{self.url}/health/ready", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _is_announced(self) -> bool:
        if "json" not in self._flags:
            return "Ctrl-C stops everything" in self.log
        marks = ('"event": "ready"', '"process": "launcher"')
        return any(all(mark in line for mark in marks) for line in self.log.splitlines())

    def pids(self) -> dict[str, list[int]]:
        """Process ids by service ("redis", "gateway", "vision_encoder", ...), oldest first."""
        found: dict[str, list[int]] = defaultdict(list)
        for child in sorted(psutil.Process(self.pid).children(), key=lambda c: c.create_time()):
            try:
                command = child.cmdline()
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
            if not any(word.endswith("fork_server.py") for word in command):  # no service
                found[_room(command)].append(child.pid)
        return dict(found)

    def all_pids(self) -> list[int]:
        """The launcher's and those of everything below it."""
        return [self.pid, *(p.pid for p in psutil.Process(self.pid).children(recursive=True))]

    def leftovers(self) -> list[Path]:
        """Folders for sockets and artifacts that are there; none after an orderly end."""
        folders = Folders(self.folder / "state")
        return [path for path in (folders.sockets, folders.artifacts) if path.exists()]

    def kill(self, service: str, number: int = 0, with_signal: int = signal.SIGKILL) -> int:
        """Sends a signal to one process of a service; returns its pid."""
        pid = self.pids()[service][number]
        os.kill(pid, with_signal)
        return pid

    def stop(self, with_signal: int = signal.SIGINT, within_s: float = 60.0) -> int:
        """Ends it as Ctrl-C would; the exit status. The state folder is kept for another start."""
        process, self._process = self._process, None
        if process is None:
            return 0
        process.send_signal(with_signal)
        try:
            return process.wait(within_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"still there after {within_s} s:\n{self.log}") from None

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.stop()
        finally:
            _ = self.log
            shutil.rmtree(self.folder, ignore_errors=True)


def _room(command: list[str]) -> str:
    """The service that a command line starts."""
    # It writes its socket behind its name.
    if command and any(name in command[0] for name in ("redis-server", "valkey-server")):
        return "redis"
    modules = [word for word in command if word.startswith("services.")]
    return modules[0].removeprefix("services.") if modules else "other"
