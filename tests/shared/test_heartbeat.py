"""A heartbeat tells of its process whatever the event loop is busy with, and of a loop that stands still."""

import asyncio
import time
from pathlib import Path

import pytest

from shared.net import healthcheck
from shared.net.heartbeat import Beat, Heartbeat, Question
from shared.net.rpc.server import RpcServer


def ask(path: Path) -> Beat:
    with Question(path) as question:
        return question.wait(30)


async def test_a_loop_that_stands_still_is_told_by_the_thread_beside_it(short_tmp: Path) -> None:
    path = short_tmp / "beat"
    heartbeat = Heartbeat(path, lambda: True)
    heartbeat.start()

    def ask_later() -> Beat:
        time.sleep(1.5)
        return ask(path)

    asking = asyncio.create_task(asyncio.to_thread(ask_later))
    await asyncio.sleep(0.1)
    time.sleep(2)
    assert (await asking).is_late
    await asyncio.sleep(0.1)
    assert not (await asyncio.to_thread(ask, path)).is_late
    heartbeat.stop()
    with pytest.raises(OSError):
        ask(path)


async def test_a_heartbeat_says_what_the_room_says(short_tmp: Path) -> None:
    path, there = short_tmp / "beat", True
    async with RpcServer(f"unix:{short_tmp}/s.sock", heartbeat=path, grace_s=0) as server:
        assert not (await asyncio.to_thread(ask, path)).is_ready
        assert await asyncio.to_thread(healthcheck.check, str(path)) == "not ready"
        await server.ready(also=lambda: there)
        assert (await asyncio.to_thread(ask, path)).is_ready
        assert await asyncio.to_thread(healthcheck.check, str(path)) == "ready"
        there = False
        async with asyncio.timeout(30):
            while (await asyncio.to_thread(ask, path)).is_ready:
                await asyncio.sleep(0.01)
        there = True
        await server.not_ready()
        assert not (await asyncio.to_thread(ask, path)).is_ready
    assert "no heartbeat" in await asyncio.to_thread(healthcheck.check, str(path))


async def test_a_process_left_its_socket_and_the_next_one_takes_it(short_tmp: Path) -> None:
    path = short_tmp / "beat"
    path.touch()
    heartbeat = Heartbeat(path, lambda: True)
    heartbeat.start()
    assert (await asyncio.to_thread(ask, path)).is_ready
    heartbeat.stop()
