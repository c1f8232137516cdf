"""Programs of ours, each run in a fork of a process that has imported what they need: starting an interpreter and
importing costs seconds, a fork hundredths of one.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

_ROOT = Path(__file__).parents[3]


class Forks:
    """Runs programs, one at a time. Made by `forks`."""

    def __init__(
        self, server: "subprocess.Popen[str]", folder: Path, environment: Mapping[str, str]
    ) -> None:
        self._server, self._folder, self._environment = server, folder, environment

    def run(
        self, module: str, *arguments: str, stdin: str = "", **variables: str
    ) -> "subprocess.CompletedProcess[str]":
        """`python -m module arguments`, with more variables in its environment."""
        paths = [self._folder / name for name in ("stdin", "stdout", "stderr")]
        paths[0].write_text(stdin, encoding="utf-8")
        environment = {**self._environment, **variables}
        job = json.dumps([module, arguments, environment, [str(path) for path in paths]])
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(f"{job}\n")
        self._server.stdin.flush()
        status = int(self._server.stdout.readline())
        said = [path.read_text(encoding="utf-8") for path in paths[1:]]
        return subprocess.CompletedProcess([module, *arguments], status, *said)


@contextlib.contextmanager
def forks(environment: Mapping[str, str], *modules: str) -> Iterator[Forks]:
    """Starts the process, in this environment, which imports the modules."""
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.processes.forks", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env=environment,
            start_new_session=True,
        )
        with server:
            try:
                yield Forks(server, Path(folder), environment)
            finally:
                os.killpg(server.pid, signal.SIGKILL)  # and a program that has not ended


def _serve(jobs: IO[str]) -> None:
    """Forks for each job, and writes how the fork ended."""
    for line in jobs:
        module, arguments, environment, paths = json.loads(line)
        pid = os.fork()
        if not pid:
            _become(environment, paths)
            os._exit(_status(module, arguments))  # to tidy up what has been imported takes a second
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _become(environment: Mapping[str, str], paths: list[str]) -> None:
    """Takes the environment, and files for its input and outputs."""
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate(paths):
        opened = os.open(
            path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        )
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)


def _status(module: str, arguments: list[str]) -> int:
    """Runs the program; its exit status."""
    sys.argv[1:] = arguments
    status: object = None
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status if isinstance(status, int) else int(status is not None)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.freeze()
    _serve(sys.stdin)
