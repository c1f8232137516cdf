"""Programs on the simulated NPU in processes that have their imports behind them: one process imports what takes
seconds, and forks for each program.

`python -m tests.ascend.prepared SOCKET` serves; `tests/ascend/environment.py` starts it. A connection is one program:
the client sends its code, its environment and where its output goes, and gets the number of its process and its status.
"""

import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shared.child_process.die_with_parent import die_with_parent

ADDRESS = "FAKE_NPU_PREPARED"  # the variable that names the socket
BREAK = "FAKE_NPU_BREAK"  # that of a program whose sources are broken (tests/ascend/breaks)
_LENGTH = 1 << 20
_FAILED = 70  # of a program that raises; 1 is what pytest says where a test fails
_LONGEST_IMPORT_S = 120.0
# What a program with broken sources imports itself.
_OURS = ("services", "shared", "tests")


class Prepared:
    """One program, from the client's side."""

    def __init__(self, code: str, environment: Mapping[str, str], output: int) -> None:
        """output: a file descriptor for what the program prints, errors too."""
        self._connection = _connected(environment[ADDRESS])
        request = {"code": code, "environment": dict(environment), "folder": os.getcwd()}
        socket.send_fds(self._connection, [json.dumps(request).encode() + b"\n"], [output])
        self._answers = self._connection.makefile()
        self.pid = int(self._answers.readline())

    def wait(self, timeout: float) -> int:
        """Its status; -1 where it ended without a word. Ends it and raises TimeoutError after so many seconds."""
        self._connection.settimeout(timeout)
        try:
            answer = self._answers.readline()
        except TimeoutError:
            self.end()
            raise
        finally:
            self._answers.close()
            self._connection.close()
        return int(answer) if answer else -1

    def end(self) -> None:
        """Ends it."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def _connected(address: str) -> socket.socket:
    """To the server, which may still be importing."""
    limit = time.monotonic() + _LONGEST_IMPORT_S
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(address)
            return connection
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            if time.monotonic() > limit:
                raise
            time.sleep(0.1)


def serve(address: Path) -> None:
    """Forks for each connection, until it is ended."""
    _import()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the programs but their clients
    end_with_server = die_with_parent()
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(address))
    server.listen(64)
    while True:
        connection, _ = server.accept()
        if not os.fork():
            end_with_server()
            server.close()
            _run(connection)
        connection.close()


def _import() -> None:
    """Everything that tests and decoders import; nothing of it reaches for the device."""
    import pytest  # noqa: F401
    import torch
    import torch_npu

    import tests.support.checkpoints
    import tests.support.decoder.greedy_reference
    import tests.support.decoder.step_stream  # noqa: F401

    assert not torch_npu.npu.is_initialized()
    torch.set_num_threads(1)


def _run(connection: socket.socket) -> None:
    """In the new process, which ends here."""
    status = _FAILED
    try:
        request = _receive(connection)
        connection.sendall(f"{os.getpid()}\n".encode())
        status = _execute(request["code"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        connection.sendall(f"{status}\n".encode())
        os._exit(status)


def _receive(connection: socket.socket) -> dict[str, Any]:
    content, descriptors, _, _ = socket.recv_fds(connection, _LENGTH, 1)
    while not content.endswith(b"\n"):
        content += connection.recv(_LENGTH)
    request: dict[str, Any] = json.loads(content)
    for stream in (1, 2):
        os.dup2(descriptors[0], stream)
    os.close(descriptors[0])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return request


def _execute(code: str) -> int:
    """The status of the program."""
    from tests.ascend.simulator import runtime

    runtime.forget_report()
    if BREAK in os.environ:
        _forget_ours()
        from tests.ascend.breaks.hook import install

        install(os.environ[BREAK])
    try:
        exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else _FAILED * bool(end.code)
    return 0


def _forget_ours() -> None:
    """What the program imports of this project is imported anew; the simulator stays."""
    for name in list(sys.modules):
        stays = name in ("tests", "tests.ascend") or name.startswith("tests.ascend.simulator")
        if name.partition(".")[0] in _OURS and not stays:
            del sys.modules[name]


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
