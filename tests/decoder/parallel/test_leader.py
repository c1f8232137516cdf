"""The first rank ends, with a line that says why, when another one is gone or silent; of one that is killed nothing is
left."""

import subprocess
import sys
from pathlib import Path

import pytest

from shared.settings import child_environment, python_path

ROOT = Path(__file__).parents[3]
# Starts another rank, and then does what is given; the rank is importing its libraries meanwhile.
PROGRAM = """
import os, time
from services.decoder.parallel import leader
from services.decoder.settings import DecoderSettings
leader._STARTING_S = {patience}
settings = DecoderSettings(model={model!r}, device="cpu", tensor_parallel_size=2)
other = leader.Leader.start(settings)._others[0]
{then}
time.sleep(30)
"""


def run(folder: Path, patience: float, then: str) -> "subprocess.CompletedProcess[str]":
    program = PROGRAM.format(patience=patience, model=str(folder), then=then)
    paths = python_path(ROOT, ROOT / "protos")
    environment = child_environment(PYTHONPATH=paths, TMPDIR=str(folder))
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=25, env=environment)


@pytest.mark.parametrize(
    ("patience", "then", "cause"),
    [
        (0.2, "other.process.send_signal(19)", "and it does nothing"),  # SIGSTOP
        # It imports for longer than that, and then says what it has not found.
        (0.2, "", "neither model.safetensors nor"),
        (60, "other.process.kill()", "its process was ended by signal 9"),
    ],
)
def test_a_rank_that_is_lost_is_named(
    tmp_path: Path, patience: float, then: str, cause: str
) -> None:
    ended = run(tmp_path, patience, then)
    assert ended.returncode == 1
    assert "a rank is lost" in ended.stdout and "rank=1" in ended.stdout and cause in ended.stdout


def test_a_decoder_that_is_killed_leaves_no_files(tmp_path: Path) -> None:
    assert run(tmp_path, 60, "os.kill(os.getpid(), 9)").returncode == -9
    assert not any(tmp_path.iterdir())
