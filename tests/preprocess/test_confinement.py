"""Hostile code in an image worker cannot reach files or network; the filter is checked for other machines as well."""

import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shared.confinement import seccomp, system_calls
from shared.confinement.seccomp import ALLOW, KILL, REFUSE, worker_filter
from shared.confinement.system_calls import MACHINES
from shared.settings import child_environment


def escape(way: str, folder: Path) -> dict[str, str]:
    (folder / "secret").write_text("keys")
    (folder / "artifact").write_bytes(b"pixels")
    with socket.socket() as server, socket.socket(socket.AF_UNIX) as local:
        server.bind(("127.0.0.1", 0))
        server.listen()
        local.bind(str(folder / "socket"))
        local.listen()
        arguments = [way, str(folder), str(os.getpid()), str(server.getsockname()[1])]
        output = subprocess.run(
            [sys.executable, "-m", "tests.support.preprocess.escapes", *arguments],
            env=child_environment(PYTHONPATH=os.pathsep.join(filter(None, sys.path))),
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
    found: dict[str, str] = json.loads(output.stdout)
    return found


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="tries calls by their numbers")
def test_hostile_code_stays_confined(short_tmp: Path) -> None:
    found = escape("seccomp", short_tmp)
    assert [name for name, end in found.items() if end == "succeeded"] == []
    assert sorted(path.name for path in short_tmp.iterdir()) == ["artifact", "secret", "socket"]
    assert (short_tmp / "artifact").read_bytes() == b"pixels"


def test_without_a_filter_no_file_is_opened_and_no_program_started(short_tmp: Path) -> None:
    asked = subprocess.run(
        [sys.executable, "-c", "from services.preprocess import landlock; landlock.install()"],
        env=child_environment(PYTHONPATH=os.pathsep.join(filter(None, sys.path))),
        check=False,
    )
    if asked.returncode:
        pytest.skip("this kernel has no Landlock")
    found = escape("no-seccomp", short_tmp)
    for name in ("create", "read", "shadow", "memory of the parent", "remove", "exec", "program"):
        assert found[name] != "succeeded", name
    for name in ("tcp", "memory"):
        assert found[name] != "succeeded", name


def run(program: seccomp.Program, arch: int, number: int, *arguments: int) -> int:
    """What the kernel would answer: the program run over a `struct seccomp_data`."""
    data = number.to_bytes(4, "little") + arch.to_bytes(4, "little") + bytes(8)
    data += b"".join(argument.to_bytes(8, "little") for argument in (*arguments, 0, 0, 0, 0))
    place = loaded = 0
    while True:
        code, if_true, if_false, operand = program[place]
        place += 1
        if code == 0x20:
            loaded = int.from_bytes(data[operand : operand + 4], "little")
        elif code == 0x06:
            return operand
        else:
            assert code in (0x15, 0x45)
            holds = loaded == operand if code == 0x15 else bool(loaded & operand)
            place += if_true if holds else if_false


@pytest.mark.parametrize("name", ["x86_64", "aarch64"])
def test_the_filter_allows_what_it_names(name: str) -> None:
    machine = MACHINES[name]
    other = next(m for key, m in MACHINES.items() if key != name)
    program = worker_filter(machine, pid=77)
    assert all(jump < 256 for step in program for jump in step[1:3])
    named = {*machine.allowed, *machine.memory, machine.tgkill}
    for number in range(600):
        answer = run(program, machine.audit, number, 77, 0, 1)
        assert answer == (ALLOW if number in named else REFUSE), number
    for number in machine.memory:
        assert run(program, machine.audit, number, 0, 0, 1 | 4) == REFUSE
    assert run(program, machine.audit, machine.tgkill, 78) == REFUSE
    assert run(program, machine.audit, machine.allowed[0] | 0x40000000) == REFUSE
    assert run(program, other.audit, machine.allowed[0]) == KILL
    assert REFUSE & 0xFFFF == errno.EPERM


@pytest.mark.parametrize(
    ("table", "header"),
    [
        (system_calls._X86_64, "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
        (system_calls._AARCH64, "/usr/include/asm-generic/unistd.h"),
    ],
)
def test_numbers_are_those_of_the_kernel(table: dict[str, int], header: str) -> None:
    if not Path(header).is_file():
        pytest.skip(f"{header} is not installed")
    lines = [line.split() for line in Path(header).read_text().splitlines()]
    known = {
        words[1].removeprefix("__NR3264_").removeprefix("__NR_"): int(words[2])
        for words in lines
        if len(words) >= 3 and words[1].startswith("__NR") and words[2].isdigit()
    }
    assert {name: known.get(name) for name in table} == table
