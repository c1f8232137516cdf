"""The first rank ends, with a line that says why, when another one is gone or silent."""

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


@pytest.mark.parametrize(
    ("patience", "then", "cause"),
    [
        (0.2, "", "nothing was heard of it for"),
        (60, "other.process.kill()", "its process was ended by signal 9"),
    ],
)
def test_a_rank_that_is_lost_is_named(
    tmp_path: Path, patience: float, then: str, cause: str
) -> None:
    program = PROGRAM.format(patience=patience, model=str(tmp_path), then=then)
    environment = child_environment(PYTHONPATH=python_path(ROOT, ROOT / "protos"))
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=25, env=environment)
    assert ended.returncode == 1
    assert "a rank is lost" in ended.stdout and "rank=1" in ended.stdout and cause in ended.stdout
