"""From outside it is seen whether a process that does not answer is at work."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from shared.child_process.activity import ProcessActivity

# A thread that holds the interpreter, as collecting garbage does, beside one that sleeps.
BUSY = "import threading, time; threading.Thread(target=time.sleep, args=(600,)).start()\nwhile True: pass"
ASLEEP = "import time; time.sleep(600)"
# Looks at a clock ten times a second, as services do that have nothing else to do.
WAKING = "import time\nwhile True: time.sleep(0.1)"
# Computes on one core, beside a thread of another process that takes nearly all of it.
STARVED = """
import os, subprocess, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from shared.child_process.die_with_parent import die_with_parent
other = subprocess.Popen([sys.executable, "-c", "while True: pass"], preexec_fn=die_with_parent())
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while True: pass
"""
OVER_S = 0.3


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[int]:
    started = subprocess.Popen([sys.executable, "-c", request.param])
    yield started.pid
    started.kill()
    started.wait()


def settles_at(activity: ProcessActivity, busy: bool) -> bool:
    """Whether it is found so for a while, within a time that any machine needs."""
    same, deadline = 0, time.monotonic() + 60
    while same < 3 and time.monotonic() < deadline:
        time.sleep(OVER_S)
        same = same + 1 if activity.is_busy() == busy else 0
    return same == 3


@pytest.mark.parametrize("process", [BUSY], indirect=True)
def test_a_process_that_computes_is_busy_until_it_is_stopped(process: int) -> None:
    activity = ProcessActivity(process, OVER_S)
    assert settles_at(activity, True)
    assert activity.used_since_s > 0
    os.kill(process, signal.SIGSTOP)
    assert settles_at(activity, False)
    os.kill(process, signal.SIGCONT)
    assert settles_at(activity, True)


@pytest.mark.parametrize("process", [ASLEEP, WAKING], indirect=True)
def test_a_process_that_sleeps_is_not_busy_and_one_that_has_ended_neither(process: int) -> None:
    activity = ProcessActivity(process, OVER_S)
    assert settles_at(activity, False)
    os.kill(process, signal.SIGKILL)
    assert settles_at(activity, False)


@pytest.mark.parametrize("process", [STARVED], indirect=True)
def test_a_process_that_waits_for_a_core_is_busy(process: int) -> None:
    while os.sched_getscheduler(process) != os.SCHED_IDLE:
        time.sleep(0.02)
    activity = ProcessActivity(process, OVER_S)
    assert settles_at(activity, True)
    assert activity.used_since_s < 0.5
