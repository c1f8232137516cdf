"""A heartbeat answers however busy the event loop is, and reports a blocked one."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shared.net import healthcheck
from shared.net.heartbeat import Beat, Heartbeat, Question
from shared.net.rpc.server import RpcServer


def ask(path: Path) -> Beat:
    with Question(path) as question:
        return question.wait(60)


def ask_until_late(path: Path) -> Beat:
    for _ in range(600):
        if (beat := ask(path)).is_late:
            break
        time.sleep(0.1)
    return beat


def blocked(condition: Callable[[], bool], how: Callable[[], object]) -> None:
    """Keeps the event loop from running, by calling `how`, until the condition holds."""
    while not condition():
        how()


async def test_a_blocked_event_loop_is_reported_by_the_thread(short_tmp: Path) -> None:
    path = short_tmp / "beat"
    heartbeat = Heartbeat(path, lambda: True)
    heartbeat.start()
    with ThreadPoolExecutor(1) as another:
        asking = another.submit(ask_until_late, path)
        blocked(asking.done, lambda: time.sleep(0.01))
    beat = asking.result()
    assert beat.is_late
    assert beat.idle_s > beat.computed_s
    async with asyncio.timeout(60):
        while (await asyncio.to_thread(ask, path)).is_late:
            await asyncio.sleep(0.1)
    heartbeat.stop()
    with pytest.raises(OSError):
        ask(path)


async def test_an_event_loop_that_computes_is_busy_not_blocked(short_tmp: Path) -> None:
    path = short_tmp / "beat"
    heartbeat = Heartbeat(path, lambda: True)
    heartbeat.start()
    with ThreadPoolExecutor(1) as another:
        asking = another.submit(ask_until_late, path)
        blocked(asking.done, lambda: sum(range(1000)))
    beat = asking.result()  # it answered nobody; the launcher looks what its threads do
    assert beat.is_late and beat.computed_s > beat.idle_s
    heartbeat.stop()


async def test_a_container_whose_event_loop_is_blocked_is_not_healthy(short_tmp: Path) -> None:
    path = short_tmp / "beat"
    heartbeat = Heartbeat(path, lambda: True)
    heartbeat.start()

    def check_until_ill() -> str:
        for _ in range(600):
            if (said := healthcheck.check(str(path), idle_s=1.0)) != "ready":
                break
            time.sleep(0.1)
        return said

    with ThreadPoolExecutor(1) as another:
        checking = another.submit(check_until_ill)
        blocked(checking.done, lambda: time.sleep(0.01))
    assert "stood still" in checking.result()
    heartbeat.beat()
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
        async with asyncio.timeout(60):
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
