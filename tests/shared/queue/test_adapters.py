"""Which adapters are served is the same for all who ask, and survives a restart of Redis that loses it."""

import pytest

from shared.errors import InvalidRequest, NotFound
from shared.queue.adapters import AdapterDirectory, AdapterRegistry
from shared.queue.keys import Keys
from tests.support.queue.client import QueueClient

KEYS = Keys("model")


async def test_names_are_given_changed_and_taken_back(client: QueueClient) -> None:
    registry = AdapterRegistry(client.redis, KEYS)
    first = await registry.put("sql", "d1", "/a b", in_place=False)
    with pytest.raises(InvalidRequest):
        await registry.put("sql", "d2", "/b", in_place=False)
    second = await registry.put("sql", "d2", "/b", in_place=True)
    found = await registry.read()
    assert found is not None and first < second == found.version
    assert found.names == {"sql": "d2"}
    assert found.folders == {"d1": "/a b", "d2": "/b"}
    assert await registry.read(second) is None
    await registry.remove("sql")
    with pytest.raises(NotFound):
        await registry.remove("sql")
    left = await registry.read(second)
    assert left is not None and not left.names
    # Admitted requests still have it.
    assert left.folders == found.folders


async def test_folders_without_a_name_are_forgotten_once_they_are_very_many(
    client: QueueClient,
) -> None:
    registry = AdapterRegistry(client.redis, KEYS)
    await registry.put("kept", "kept", "/kept", in_place=False)
    for number in range(1005):
        await registry.put("sql", f"d{number}", "/a", in_place=True)
    found = await registry.read()
    assert found is not None
    assert set(found.folders) == {"kept"} | {f"d{number}" for number in range(4, 1005)}


async def test_what_a_restart_of_redis_has_lost_is_put_back(client: QueueClient) -> None:
    registry = AdapterRegistry(client.redis, KEYS)
    await registry.put("sql", "d1", "/a", in_place=False)
    async with AdapterDirectory(registry) as directory:
        await registry.put("gone", "d2", "/b", in_place=False)
        await registry.remove("gone")
        await directory.refresh()
        assert directory.adapters.names == {"sql": "d1"}
        await client.redis.flushall()
        # What a connection to another run finds out.
        directory._restarts = -1
        await directory.refresh()
        assert directory.adapters.names == {"sql": "d1"}
    async with AdapterDirectory(registry) as other:
        assert other.adapters.names == {"sql": "d1"}
        assert other.adapters.folders == {"d1": "/a", "d2": "/b"}
