"""Fixtures for what stands on Redis."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.simulation.twin_server import TwinServer
from tests.support.queue_desk import Desk


@pytest.fixture(params=["lua", "python"])
async def desk(request: pytest.FixtureRequest, short_tmp: Path) -> AsyncIterator[Desk]:
    """A queue on the session's Redis, and one on the scripts' Python twins: both keep the same contract."""
    if request.param == "lua":
        desk = Desk(request.getfixturevalue("redis_url"))
        yield desk
        await desk.redis.aclose()
        return
    with TwinServer(short_tmp / "twins.sock") as server:
        desk = Desk(server.url)
        yield desk
        await desk.redis.aclose()
