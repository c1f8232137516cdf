"""Fixtures for what stands on Redis."""

from collections.abc import AsyncIterator

import pytest

from tests.support.queue_desk import Desk


@pytest.fixture
async def desk(redis_url: str) -> AsyncIterator[Desk]:
    """A queue on the session's Redis."""
    desk = Desk(redis_url)
    yield desk
    await desk.redis.aclose()
