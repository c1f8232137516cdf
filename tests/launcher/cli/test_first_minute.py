"""What the command does before it serves: without generated protos, with a closed pipe, at Ctrl-C."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]
_WITHOUT_PROTOS = (
    "import sys; sys.modules['tessera'] = None;"
    "from services.launcher import cli; sys.argv[0] = 'tessera'; cli.main()"
)


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=_ROOT,
        env={"PYTHONPATH": f"{_ROOT}:{_ROOT / 'protos'}", "PATH": os.environ["PATH"]},
    )


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, errors = process.communicate(timeout=110)
    return process.returncode, out, errors


@pytest.mark.parametrize(
    "command",
    [
        *("", "serve", "bench serve"),
        *(
            pytest.param(command, marks=pytest.mark.full)
            for command in ("chat", "bench", "bench kill", "profile", "check")
        ),
    ],
)
def test_help_needs_no_generated_protos(command: str) -> None:
    status, out, errors = finished(start("-c", _WITHOUT_PROTOS, *command.split(), "--help"))
    assert (status, errors) == (0, "")
    assert out.startswith(f"usage: tessera {command}".rstrip())


def test_doctor_says_that_the_protos_are_missing() -> None:
    status, out, errors = finished(start("-c", _WITHOUT_PROTOS, "doctor"))
    assert (status, errors) == (1, "")
    assert "generated protos  not there" in out and "-> make proto" in out
    assert "not looked at: tessera" in out


def test_what_needs_them_says_how_to_make_them() -> None:
    status, out, errors = finished(start("-c", _WITHOUT_PROTOS, "serve"))
    assert (status, out) == (1, "")
    assert errors == "tessera: the generated protos are missing: run `make proto`\n"


@pytest.mark.parametrize(
    "arguments",
    [["serve", "--help"], ["version"], pytest.param(["check"], marks=pytest.mark.full)],
)
def test_a_reader_that_has_left_is_no_error(arguments: list[str]) -> None:
    process = start("-m", "services.launcher", *arguments)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert errors == ""
    assert process.wait(110) == 128 + signal.SIGPIPE


@pytest.mark.parametrize("seconds", [0.15, 0.3, 0.6, 1.2])
def test_ctrl_c_while_libraries_load_leaves_no_traceback(seconds: float, tmp_path: Path) -> None:
    process = start(
        "-c",
        "import sys; sys.argv[0] = 'tessera'; from services.launcher import cli;"
        "print('began', flush=True); cli.main()",
        *("serve", "--port", "0", "--state-dir", str(tmp_path)),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "began\n"
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, _, errors = finished(process)
    assert "Traceback" not in errors


def test_profile_without_a_model_measures_the_demo_model() -> None:
    few = ("--prompt", "8", "--steps", "2")
    status, out, errors = finished(start("-m", "services.launcher", "profile", *few))
    assert (status, errors) == (0, "")
    assert "decode: 2 steps" in out and "paged_attention" in out


@pytest.mark.parametrize("variables", [{}, {"NO_COLOR": "1"}])
def test_a_terminal_has_colours_unless_it_wants_none(variables: dict[str, str]) -> None:
    terminal, other = pty.openpty()
    service = subprocess.Popen(
        [sys.executable, "-m", "services.scheduler", "--model", "/nowhere"],
        stdin=subprocess.DEVNULL,
        stdout=other,
        stderr=other,
        cwd=_ROOT,
        env={
            "PYTHONPATH": f"{_ROOT}:{_ROOT / 'protos'}",
            "PATH": os.environ["PATH"],
            "TERM": "xterm",
            **variables,
        },
    )
    os.close(other)
    said = b""
    with open(terminal, "rb", 0) as reader, contextlib.suppress(OSError):  # the other end is closed
        while piece := reader.read(4096):
            said += piece
    assert service.wait(110) == 2
    assert b"/nowhere" in said
    assert (b"\x1b[" in said) == (not variables)
