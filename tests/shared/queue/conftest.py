"""Fixtures for tests on Redis."""

from collections.abc import AsyncIterator

import pytest

from tests.support.queue.client import QueueClient


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[QueueClient]:
    """A queue on the session's Redis."""
    client = QueueClient(redis_url)
    yield client
    await client.redis.aclose()
