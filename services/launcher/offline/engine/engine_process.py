"""The services of an engine: `tessera serve` in a process of its own, on a loopback port, for whoever has its key."""

import contextlib
import http.client
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.launcher.offline.engine.flags import (
    OWN_VARIABLES,
    engine_flags,
    lora_modules,
    serve_arguments,
)
from services.launcher.offline.errors import EngineFailed
from services.launcher.offline.requests.requests import Requests
from services.launcher.offline.requests.token_texts import TokenTexts
from services.launcher.ports import free_ports
from shared.settings import child_environment, python_path

_ROOT = Path(__file__).parents[4]
_HOST = "127.0.0.1"
_LINES_KEPT = 40
_LOOK_S = 0.05
_END_WITHIN_S = 15.0
# A launcher that has run for less is not started again.
_STEADY_S = 5.0


class EngineProcess:
    """Starts the services, and ends them by `stop`; they also end when this process does, however that ends. A service
    that dies is started again by the launcher, and the launcher by this object: the queue is in a file, so that open
    requests go on.
    """

    def __init__(self, model: str | Path | None, flags: Mapping[str, Any]) -> None:
        """Raises TypeError or ValueError for wrong flags. Returns before the services are ready."""
        flags = engine_flags(flags)
        arguments = serve_arguments(model, flags)
        self._modules = lora_modules(flags)
        self._loads_adapters = flags.get("allowed_adapter_dir") is not None
        self.token_texts = TokenTexts(
            model, *(str(flags.get(name) or "") for name in ("revision", "mmproj"))
        )
        self.port, grpc_port = free_ports(_HOST, 2)
        self.key = secrets.token_urlsafe(32)
        self._folder = tempfile.mkdtemp(prefix="tessera-")
        self._arguments = [*arguments, f"--port={self.port}", f"--grpc-port={grpc_port}"]
        self._owner = os.getpid()
        self._lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._lock = threading.Lock()
        self._stopping = False
        self._was_ready = False
        self._ended = threading.Event()
        self._process = self._start()
        self._reader = threading.Thread(target=self._read, name="tessera-launcher", daemon=True)
        self._reader.start()

    @property
    def url(self) -> str:
        """Base URL of the REST API."""
        return f"http://{_HOST}:{self.port}"

    def requests(self) -> Requests:
        """What sends requests to it, for one event loop."""
        return Requests(
            self.url,
            self.key,
            self.failure,
            self.token_texts,
            self._modules,
            loads_adapters=self._loads_adapters,
        )

    @property
    def pid(self) -> int:
        """The launcher's process id."""
        return self._process.pid

    def failure(self) -> str:
        """Why the services have ended for good; empty as long as they have not."""
        if not self._ended.is_set():
            return ""
        return "\n".join(self._lines) or "the services have ended"

    def wait_ready(self) -> None:
        """Returns when all services are ready. Raises EngineFailed with what they said where they do not come up."""
        while not self._is_ready():
            if failure := self.failure():
                raise EngineFailed(failure)
            time.sleep(_LOOK_S)
        self._was_ready = True

    def stop(self) -> None:
        """Ends the services and removes what they wrote. Does nothing in a process that was forked from this one."""
        if os.getpid() != self._owner or self._stopping:
            return
        with self._lock:
            self._stopping = True
            process = self._process
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_END_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
        except BaseException:  # Ctrl-C once more: at once
            process.send_signal(signal.SIGTERM)
            raise
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_WITHIN_S)
            self._reader.join(_END_WITHIN_S)
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [
                # -P: without the working directory on the path, where a folder may be called `services` too.
                *(sys.executable, "-P", "-m", "services.launcher.offline.engine.system"),
                *(str(self._owner), self._folder, *self._arguments),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            # Ctrl-C in a terminal reaches this program alone.
            start_new_session=True,
            env=child_environment(
                *OWN_VARIABLES,
                TESSERA_API_KEY=self.key,
                PYTHONPATH=python_path(_ROOT, _ROOT / "protos"),
            ),
        )

    def _read(self) -> None:
        """Shows what the launcher says, and starts it again when it ends; in a thread of its own."""
        while True:
            began = time.monotonic()
            process = self._process
            assert process.stderr is not None
            for line in process.stderr:
                self._show(line.decode(errors="replace").rstrip())
            process.stderr.close()
            status = process.wait()
            with self._lock:
                is_steady = self._was_ready and time.monotonic() - began > _STEADY_S
                if self._stopping or not is_steady or status >= 0:  # it has said why
                    break
                self._show(f"launcher ended with status {status}, starting it again")
                self._process = self._start()
        self._ended.set()

    def _show(self, line: str) -> None:
        self._lines.append(line)
        with contextlib.suppress(ValueError, OSError):  # closed, or nobody reads it any more
            print(line, file=sys.stderr, flush=True)

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection(_HOST, self.port, timeout=2)
        try:
            connection.request("GET", "/health/ready")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
