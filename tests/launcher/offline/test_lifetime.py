"""What is left of an engine when its program ends, however that ends: nothing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from shared.settings import python_path
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[3]
# No model: the demo model, from any folder.
PROGRAM = """
import sys
from tessera import LLM, SamplingParams
llm = LLM(language_model_only=True)
(output,) = llm.generate("The red circle", SamplingParams(max_tokens=2))
print(llm.pid, len(output.outputs[0].token_ids), flush=True)
sys.stdin.readline()
llm.generate("The red circle", SamplingParams(max_tokens=4000, ignore_eos=True))
"""


def runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    "end",
    [
        pytest.param("exit", marks=pytest.mark.full),
        "kill",
        pytest.param("interrupt", marks=pytest.mark.full),
    ],
)
def test_nothing_is_left(end: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT, ROOT / "protos")}
    program = PROGRAM if end == "interrupt" else PROGRAM.rpartition("llm.generate")[0]
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**environment, "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    pid, tokens = map(int, process.stdout.readline().split())
    assert tokens == 2
    launcher = psutil.Process(pid)
    started = [launcher, *launcher.children(recursive=True)]
    assert len(started) > 5 and list(tmp_path.iterdir())
    if end == "kill":
        process.kill()
    else:
        process.stdin.write("\n")
        process.stdin.flush()
    if end == "interrupt":
        time.sleep(0.5)  # it generates
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert ("KeyboardInterrupt" in errors) == (end == "interrupt"), errors
    if end == "exit":
        assert process.returncode == 0 and errors == ""
    until(lambda: not any(map(runs, started)), "its processes")
    until(lambda: not list(tmp_path.iterdir()), "its folders")


FORKED = """
import asyncio, os
from services.launcher.offline.loop_thread import LoopThread

loop = LoopThread()
assert loop.run(asyncio.sleep(0, "here")) == "here"
if os.fork() == 0:
    try:
        loop.run(asyncio.sleep(0))
    except RuntimeError as error:
        print(error, flush=True)
    loop.close(lambda: None)
    os._exit(0)
os.wait()
loop.close(lambda: None)
"""


def test_a_forked_program_is_told_that_it_has_none(tmp_path: Path) -> None:
    """Its threads do not go on in a child: what is asked there would never be answered."""
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT, ROOT / "protos")}
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert told.stdout == "this LLM was made in another process: make one here\n"
