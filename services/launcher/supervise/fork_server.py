"""A process that imports what services need, once for all of them, and forks a new process for each service to run in.

A program of its own, run by its path: `fork_server.py '[[4, ["decoder", "vision_encoder"], {}], [5, ["gateway"], {}]]'`
has on each of these descriptors a socket on which the launcher asks for processes of these services; the variables are
set before their libraries are imported. Each socket has a process: the first is this one, the others are forked from it
when the libraries of all services are there. The launcher's side is `forking.py`.

A request is a JSON object with the descriptor that becomes standard output and standard error; the answer is `{"pid":
...}` or `{"refused": why}`. A fork has only the thread that forks, and the locks as they are: it is refused unless this
process has a single thread, as it has while it only imports.

The new process is no child of this one, whose end would end it: its parent, a process for this alone, has ended before
it runs, and it is the launcher's child then (which is their subreaper meanwhile) like any that the launcher starts.
"""

import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

import shared.lean_start  # noqa: F401  (before what is imported below)
from shared.child_process.die_with_parent import die_with_parent
from shared.settings import change_process_environment

# Of every service, and nearly all that scheduler and preprocess need.
_COMMON = ("services.families.prepare", "shared.service_process", "shared.net.channels")
# Of each service, before its model is known.
_OWN = {
    "gateway": "services.gateway.gateway",
    "scheduler": "services.scheduler.server",
    "preprocess": "services.preprocess.server",
    "vision_encoder": "services.vision_encoder.server",
    "decoder": "services.decoder.server",
}
_GO = b"\n"
_LONGEST_REQUEST = 1 << 20  # bytes


def main(groups: Sequence[tuple[int, Sequence[str], dict[str, str]]]) -> None:
    """Serves requests until the launcher closes the sockets; in a new process it runs the service."""
    launcher = os.getppid()
    for module in _COMMON:
        _import(module)
    controls = [socket.socket(fileno=descriptor) for descriptor, _, _ in groups]
    number = _split(len(groups))
    for other, control in enumerate(controls):
        if other != number:
            control.close()
    _, services, variables = groups[number]
    change_process_environment(variables)
    request = _serve(controls[number], list(services), launcher)
    if request is not None:
        sys.argv = [request["module"]]
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def _split(count: int) -> int:
    """Forks, so that there are `count` of this process; the number of each."""
    first = os.getpid()
    for number in range(1, count if _refusal() == "" else 1):
        if os.fork() == 0:
            die_with_parent(parent=first)()
            return number
    return 0


def _serve(control: socket.socket, services: list[str], launcher: int) -> dict[str, Any] | None:
    """Imports, and forks in between when it is asked. Returns the request in a new process, None at the end."""
    imported = set()
    while True:
        is_asked = bool(select.select([control], [], [], 0)[0])
        if services and not is_asked:
            service = services.pop(0)
            _import(_OWN[service])
            imported.add(service)
            continue
        message, descriptors, _, _ = socket.recv_fds(control, _LONGEST_REQUEST, 1)
        if not message:
            return None
        request: dict[str, Any] = json.loads(message)
        if request["service"] not in imported:
            _import(_OWN[request["service"]])
            imported.add(request["service"])
        if _fork(control, launcher):
            _become(request, descriptors[0], launcher)
            control.close()
            return request
        os.close(descriptors[0])


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception:  # which the service meets too, and says
        return


def _refusal() -> str:
    """Why this process must not be forked; empty if it may."""
    threads = len(os.listdir("/proc/self/task"))
    return "" if threads == 1 else f"what it has imported has started threads: {threads} run"


def _fork(control: socket.socket, launcher: int) -> bool:
    """Whether this is the new process."""
    if refusal := _refusal():
        control.send(json.dumps({"refused": refusal}).encode())
        return False
    gc.freeze()  # a collection in the new process would copy the pages of all that is imported
    gate, opening = os.pipe()
    told, telling = os.pipe()
    between = os.fork()
    if between == 0:
        os.close(opening)
        os.close(told)
        try:
            pid = os.fork()
        except OSError:
            pid = -1
        if pid != 0:
            os.write(telling, str(pid).encode())
            os._exit(0)
        os.close(telling)
        is_wanted = os.read(gate, 1) == _GO
        os.close(gate)
        if not is_wanted or os.getppid() != launcher:
            os._exit(1)
        return True
    os.close(gate)
    os.close(telling)
    pid = int(os.read(told, 32) or b"-1")
    os.close(told)
    os.waitpid(between, 0)  # from now on the launcher is the parent
    answer = {"pid": pid} if pid > 0 else {"refused": "the kernel forks no process"}
    control.send(json.dumps(answer).encode())
    if pid > 0:
        os.write(opening, _GO)
    os.close(opening)
    return False


def _become(request: dict[str, Any], output: int, launcher: int) -> None:
    """Gives the new process what a started one would have."""
    os.setsid()
    number = signal.Signals(request["end_with"])
    die_with_parent(number, request["niceness"], parent=launcher)()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(output)
    change_process_environment(request["environment"], alone=True)
    _show_command(request["command"])


def _show_command(words: Sequence[str]) -> None:
    """Makes `ps` and others show these words, in the memory where the kernel has put those of the fork server.

    Source: proc(5), /proc/pid/cmdline and the fields arg_start and arg_end of /proc/pid/stat.
    """
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    if start and end > start:
        text = b"".join(os.fsencode(word) + b"\0" for word in words)
        size = end - start
        ctypes.memmove(start, text[: size - 1].ljust(size, b"\0"), size)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
