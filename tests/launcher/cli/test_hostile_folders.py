"""Folders that block, recurse, or size things by numbers that no model has: each is one line with its file and key."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from services.launcher import check
from shared.settings import DEMO_MODEL, child_environment
from tests.support.hostile_folders import HOSTILE

# One of each kind that would block, take gigabytes, or end in a traceback.
_QUICK = ("linked fifo", "device", "very deep", "layers", "a million tensors")
_MOST_MIB = 700
# The kernel counts what a process's parent had when it was started as memory of the child: a small one starts it.
_MEASURED = """
import pathlib, resource, subprocess, sys
status = subprocess.call(sys.argv[2:])
used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
pathlib.Path(sys.argv[1]).write_text(str(used))
sys.exit(status)
"""


def hostile(name: str, folder: Path) -> str:
    """Makes the folder; what is said of it."""
    change, said = HOSTILE[name]
    shutil.copytree(DEMO_MODEL, folder)
    change(folder)
    return said


def ended(folder: Path, program: str, *arguments: str) -> tuple[int, str]:
    """The status of a process and what it wrote. It must not take more than _MOST_MIB of memory."""
    peak = folder.with_suffix(".kib")
    process = subprocess.run(
        [
            sys.executable,
            "-S",
            "-c",
            _MEASURED,
            str(peak),
            sys.executable,
            "-m",
            program,
            *arguments,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=child_environment(PYTHONPATH=os.pathsep.join(filter(None, sys.path))),
    )
    assert int(peak.read_text()) < _MOST_MIB << 10
    return process.returncode, process.stdout


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", HOSTILE)
def test_check_refuses_in_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = hostile(name, tmp_path / "model")
    assert check.main([str(tmp_path / "model")]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert "refused" in last and re.search(said, last)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in _QUICK else pytest.mark.full) for name in HOSTILE],
)
def test_check_as_a_process_ends_without_a_traceback(name: str, tmp_path: Path) -> None:
    said = hostile(name, tmp_path / "model")
    status, wrote = ended(tmp_path / "model", "services.launcher", "check", str(tmp_path / "model"))
    assert status == 1 and "Traceback" not in wrote
    assert re.search(said, wrote.splitlines()[-1])


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("service", "name"),
    [
        ("preprocess", "fifo that no reader here looks at"),
        ("decoder", "layers"),
        pytest.param("preprocess", "NaN", marks=pytest.mark.full),
        pytest.param("decoder", "fifo of weights", marks=pytest.mark.full),
        pytest.param("gateway", "ids of tokens", marks=pytest.mark.full),
        pytest.param("vision_encoder", "heads in a list", marks=pytest.mark.full),
        pytest.param("scheduler", "deep tokenizer", marks=pytest.mark.full),
    ],
)
def test_a_service_does_not_start(service: str, name: str, tmp_path: Path) -> None:
    said = hostile(name, tmp_path / "model")
    arguments = ("--model", str(tmp_path / "model"), "--redis-url", f"unix://{tmp_path}/none.sock")
    status, wrote = ended(tmp_path / "model", f"services.{service}", *arguments)
    assert status == 2 and "Traceback" not in wrote
    assert re.search(said, wrote)
