"""Responses are kept for a time and within a budget; what is forgotten is not written again."""

import asyncio

import pytest

from shared.errors import InvalidRequest
from shared.queue.keys import Keys
from shared.queue.stores.response_store import KeptResponse, ResponseStore
from tests.support.queue.client import QueueClient

KEYS = Keys("model")
HOUR_MS = 3_600_000


def new(name: str, size: int = 10) -> KeptResponse:
    return KeptResponse(name, "tenant", "", b"i" * size, b"{}")


def store_of(client: QueueClient, keep_ms: int = HOUR_MS, limit: int = 1000) -> ResponseStore:
    return ResponseStore(client.redis, KEYS, keep_ms, limit)


async def test_what_was_used_longest_ago_makes_room(client: QueueClient) -> None:
    store = store_of(client, limit=1000)
    for name in ("a", "b", "c"):
        await store.keep(new(name, 250))
        await asyncio.sleep(0.005)
    await store.renew("a")
    await asyncio.sleep(0.005)
    assert await store.finish("c", b"r" * 300)
    assert await store.find("b") is None
    kept = await store.find("c")
    assert kept is not None and (kept.response, kept.tenant) == (b"r" * 300, "tenant")
    assert await store.find("a") == new("a", 250)
    assert await store.unfinished(-5000, 10) == ["a"]


async def test_what_is_too_large_is_refused_and_changes_nothing(client: QueueClient) -> None:
    store = store_of(client, limit=1000)
    await store.keep(new("a"))
    with pytest.raises(InvalidRequest, match="--response-store-bytes"):
        await store.keep(new("b", 1000))
    assert await store.find("a") == new("a") and await store.find("b") is None
    assert not await store.finish("a", b"r" * 1000)
    assert await store.find("a") is None, "a response that cannot be kept whole is not kept"


async def test_what_is_forgotten_is_not_finished(client: QueueClient) -> None:
    store = store_of(client)
    await store.keep(new("a"))
    assert await store.forget("a") and not await store.forget("a")
    assert not await store.finish("a", b"{}")
    assert await store.find("a") is None and await store.tenant("a") is None
    assert await client.redis.keys("*responses*") == [f"{KEYS.prefix}:responses:total".encode()]
    assert await client.redis.get(f"{KEYS.prefix}:responses:total") == b"0"


async def test_they_expire_and_are_counted_no_more(client: QueueClient) -> None:
    store = store_of(client, keep_ms=50)
    await store.keep(new("a"))
    async with asyncio.timeout(60):
        while await store.find("a") is not None:
            await asyncio.sleep(0.01)
    await store_of(client).keep(new("b", 20))
    size = await client.redis.hgetall(f"{KEYS.prefix}:responses:sizes")
    assert [*size] == [b"b"]
    assert await client.redis.get(f"{KEYS.prefix}:responses:total") == size[b"b"]
    assert await store.unfinished(-5000, 10) == ["b"]


async def test_each_is_kept_once(client: QueueClient) -> None:
    store = store_of(client)
    await store.keep(new("a"))
    assert await store.finish("a", b"first") and await store.finish("a", b"second")
    await store.keep(new("a", 99))
    kept = await store.find("a")
    assert kept is not None and (kept.input, kept.response) == (b"i" * 10, b"first")
    assert await store.unfinished(-5000, 10) == []
