"""Background tasks that fail are counted and started again."""

import asyncio
import signal
import subprocess
import sys

from shared.net import supervise
from shared.net.backoff import Backoff
from shared.net.supervise import Background

_HOPELESS = """
import asyncio
from shared.net import supervise
from shared.net.backoff import Backoff

async def fail():
    raise ValueError("no")

async def main():
    supervise.Background("hopeless", fail, Backoff(0.001, 0.001))
    await asyncio.sleep(60)

asyncio.run(main())
"""


_QUICKLY = Backoff(first_s=0.001, longest_s=0.001)


async def test_a_failed_task_is_started_again_and_counted() -> None:
    begun = 0
    works = asyncio.Event()

    async def body() -> None:
        nonlocal begun
        begun += 1
        if begun < 3:
            raise KeyError("unexpected")
        works.set()
        await asyncio.sleep(3600)

    task = Background("a test's", body, _QUICKLY)
    async with asyncio.timeout(60):
        await works.wait()
    assert begun == 3 and supervise.failures["a test's"] == 2
    await task.end()


async def test_a_task_that_returned_or_was_ended_is_not_started_again() -> None:
    begun = []

    async def once() -> None:
        begun.append("once")

    async def long() -> None:
        begun.append("long")
        await asyncio.sleep(3600)

    done, running = Background("once", once, _QUICKLY), Background("long", long, _QUICKLY)
    await asyncio.sleep(0)
    await supervise.end(done, running, None)
    await asyncio.sleep(10 * _QUICKLY.longest_s)
    assert begun == ["once", "long"]


def test_a_process_whose_task_keeps_failing_gets_sigterm() -> None:
    ended = subprocess.run([sys.executable, "-c", _HOPELESS], capture_output=True, timeout=60)
    assert ended.returncode == -signal.SIGTERM
    assert b"fails again and again" in ended.stdout + ended.stderr


def test_pauses_double_up_to_the_longest() -> None:
    backoff = Backoff(first_s=0.5, longest_s=8.0)
    assert [backoff.pause_s(failures) for failures in range(1, 7)] == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0]
    assert backoff.pause_s(100_000) == 8.0
