"""Hostile code in a confined image worker: a program that tries to get out and says what it could do.

`python -m support.escapes <"seccomp" or "no-seccomp"> <folder with a file "secret"> <pid of the parent>
<port of a listener>`; prints a JSON object: each attempt's name, and its error or "succeeded".
"""

import ctypes
import json
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from shared.confinement.confinement import confine


def attempts(folder: Path, parent: int, port: int, held: int) -> dict[str, Callable[[], object]]:
    """What is tried; each raises, or is an escape."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(number: int, *arguments: object) -> None:
        """A system call by its number on x86-64."""
        if libc.syscall(ctypes.c_long(number), *arguments) < 0:
            raise OSError(ctypes.get_errno(), "refused")

    def talk(family: int, kind: int, address: str | tuple[str, int]) -> None:
        with socket.socket(family, kind) as peer:
            peer.settimeout(2)
            peer.connect(address)
            peer.send(b"x")

    def listen() -> None:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen()

    def fork() -> None:
        if os.fork() == 0:
            os._exit(0)

    return {
        "tcp": lambda: talk(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", port)),
        "udp": lambda: talk(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", port)),
        "unix socket": lambda: talk(socket.AF_UNIX, socket.SOCK_STREAM, str(folder / "socket")),
        "listen": listen,
        "create": lambda: os.open(folder / "new", os.O_WRONLY | os.O_CREAT, 0o600),
        "read": lambda: os.open(folder / "secret", os.O_RDONLY),
        "shadow": lambda: os.open("/etc/shadow", os.O_RDONLY),
        "memory of the parent": lambda: os.open(f"/proc/{parent}/mem", os.O_RDWR),
        "remove": lambda: os.unlink(folder / "secret"),
        "rename": lambda: os.rename(folder / "secret", folder / "other"),
        "folder": lambda: os.mkdir(folder / "new folder"),
        "link": lambda: os.symlink("/etc", folder / "link"),
        "exec": lambda: os.execv("/bin/true", ["/bin/true"]),
        "program": lambda: subprocess.run(["/bin/true"], check=True),
        "fork": fork,
        "kill": lambda: os.kill(parent, signal.SIGCONT),
        "tgkill": lambda: call(234, parent, parent, 0),
        "ptrace": lambda: call(101, 16, parent, None, None),
        "process_vm_readv": lambda: call(310, parent, None, 0, None, 0, 0),
        "io_uring": lambda: call(425, 8, ctypes.create_string_buffer(256)),
        "memory file": lambda: os.memfd_create("x"),
        "mount": lambda: call(165, None, b"/tmp", b"tmpfs", 0, None),
        "bpf": lambda: call(321, 0, None, 0),
        "executable memory": lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_EXEC | mmap.PROT_READ),
        "limits": lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)),
        "shrink an artifact": lambda: os.ftruncate(held, 0),
    }


def main(way: str, folder: str, parent: str, port: str) -> None:
    """Confines itself, then tries everything."""
    held = os.open(Path(folder) / "artifact", os.O_WRONLY)
    tries = attempts(Path(folder), int(parent), int(port), held)
    confine(64 << 20, 1 << 20, use_seccomp=way == "seccomp")
    found = {}
    for name, attempt in tries.items():
        try:
            attempt()
            found[name] = "succeeded"
        except (OSError, ValueError) as error:
            found[name] = type(error).__name__
    try:
        bytearray(1 << 30)
        found["memory"] = "succeeded"
    except MemoryError:
        found["memory"] = "MemoryError"
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
