"""Background tasks that fail are heard of, and begin again."""

import asyncio
import signal
import subprocess
import sys

from shared.net import supervise
from shared.net.supervise import Background

_HOPELESS = """
import asyncio
from shared.net import supervise

async def fail():
    raise ValueError("no")

async def main():
    supervise.FIRST_PAUSE_S = 0.001
    supervise.Background("hopeless", fail)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_it_begins_again_and_is_counted() -> None:
    begun = 0
    works = asyncio.Event()

    async def body() -> None:
        nonlocal begun
        begun += 1
        if begun < 3:
            raise KeyError("something that nobody thought of")
        works.set()
        await asyncio.sleep(3600)

    task = Background("a test's", body)
    async with asyncio.timeout(30):
        await works.wait()
    assert begun == 3 and supervise.failures["a test's"] == 2
    await task.end()


async def test_what_returns_is_over_and_what_ends_stays_ended() -> None:
    begun = []

    async def once() -> None:
        begun.append("once")

    async def long() -> None:
        begun.append("long")
        await asyncio.sleep(3600)

    done, running = Background("once", once), Background("long", long)
    await asyncio.sleep(0)
    await supervise.end(done, running, None)
    await asyncio.sleep(2 * supervise.FIRST_PAUSE_S)
    assert begun == ["once", "long"]


def test_a_process_in_which_nothing_helps_is_asked_to_stop() -> None:
    ended = subprocess.run([sys.executable, "-c", _HOPELESS], capture_output=True, timeout=60)
    assert ended.returncode == -signal.SIGTERM
    assert b"fails again and again" in ended.stdout + ended.stderr
