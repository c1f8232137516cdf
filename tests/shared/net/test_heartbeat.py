"""A heartbeat answers however busy the event loop is, and reports a blocked one."""

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


async def test_a_blocked_event_loop_is_reported_by_the_thread(short_tmp: Path) -> None:
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


async def test_an_event_loop_that_computes_is_busy_not_blocked(short_tmp: Path) -> None:
    path = short_tmp / "beat"
    heartbeat = Heartbeat(path, lambda: True)
    heartbeat.start()

    def ask_until_late() -> Beat:
        while not (beat := ask(path)).is_late:
            time.sleep(0.1)
        return beat

    asking = asyncio.create_task(asyncio.to_thread(ask_until_late))
    await asyncio.sleep(0.1)
    end = time.thread_time() + 3
    while time.thread_time() < end:
        pass
    beat = await asyncio.wait_for(
        asking, 1
    )  # it answered nobody; the launcher looks what its threads do
    assert beat.computed_s > beat.idle_s
    heartbeat.stop()


async def test_a_container_whose_event_loop_is_blocked_is_not_healthy(short_tmp: Path) -> None:
    path = short_tmp / "beat"
    heartbeat = Heartbeat(path, lambda: True)
    heartbeat.start()

    def check_later() -> str:
        time.sleep(2)
        return healthcheck.check(str(path), idle_s=1.0)

    checking = asyncio.create_task(asyncio.to_thread(check_later))
    await asyncio.sleep(0.1)
    time.sleep(3)
    assert "stood still" in await checking
    assert await asyncio.to_thread(healthcheck.check, str(path)) == "ready"
    heartbeat.stop()


async def test_a_heartbeat_reports_whether_the_service_is_ready(short_tmp: Path) -> None:
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


async def test_a_socket_left_behind_is_replaced(short_tmp: Path) -> None:
    path = short_tmp / "beat"
    path.touch()
    heartbeat = Heartbeat(path, lambda: True)
    heartbeat.start()
    assert (await asyncio.to_thread(ask, path)).is_ready
    heartbeat.stop()
