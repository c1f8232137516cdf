"""Raw media: stored bytes come back, and their counted total is bounded and exact."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from services.launcher.redis.embedded_redis import EmbeddedRedis
from shared.errors import NotFound, Overloaded, Unavailable
from shared.queue import connect
from shared.queue.stores import media_store
from shared.queue.stores.media_store import MediaStore, media_digest
from tests.support.queue.lost_tail import go_back_to, keep_copy


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = Redis.from_url(redis_url)
    yield client
    await client.aclose()


async def total(redis: Redis) -> int:
    return int(await redis.get("t:{media}:total") or 0)


async def test_bytes_come_back_in_pieces(redis: Redis) -> None:
    store = MediaStore(redis)
    for data in (b"x", bytes(range(256)) * 9000):  # one piece, three pieces
        digest = media_digest(data)
        await asyncio.gather(*(store.put(digest, data) for _ in range(3)))
        assert await store.get(digest) == data
        assert 0 < await redis.pttl(f"t:media:{{{digest.hex()}}}") <= media_store.TTL_MS
    assert await total(redis) == 1 + 256 * 9000
    with pytest.raises(NotFound):
        await store.get(media_digest(b"never stored"))


async def test_the_limit_holds_and_expired_bytes_are_freed(redis: Redis) -> None:
    store = MediaStore(redis, limit_bytes=100)
    first, second = b"a" * 60, b"b" * 60
    await store.put(media_digest(first), first)
    with pytest.raises(Overloaded):
        await store.put(media_digest(second), second)
    assert await total(redis) == 60
    expiry = "t:{media}:expiry"
    held: Any = await redis.zrange(expiry, 0, -1)
    await redis.zadd(expiry, dict.fromkeys(held, 1))  # its time is over
    await store.put(media_digest(second), second)
    assert await total(redis) == 60


async def test_renewal_keeps_stored_media_and_returns_missing_ones(redis: Redis) -> None:
    store = MediaStore(redis)
    digest, gone = media_digest(b"here"), media_digest(b"gone")
    await store.put(digest, b"here")
    key = f"t:media:{{{digest.hex()}}}"
    await redis.pexpire(key, 1000)
    assert await store.renew([digest, gone, digest]) == [gone]
    assert await redis.pttl(key) > 1000
    assert await store.renew([]) == []
    assert await redis.zcard("t:{media}:expiry") == 1


async def test_bytes_that_expired_early_are_written_again(redis: Redis) -> None:
    store = MediaStore(redis)
    digest = media_digest(b"here")
    await store.put(digest, b"here")
    await redis.delete(f"t:media:{{{digest.hex()}}}")
    await store.put(digest, b"here")
    assert await store.get(digest) == b"here"
    assert await total(redis) == 4


async def test_media_that_redis_has_lost_can_be_sent_again(private_redis: EmbeddedRedis) -> None:
    redis = connect(private_redis.url)
    store = MediaStore(redis, limit_bytes=25)
    old, new = b"o" * 10, b"n" * 10
    await store.put(media_digest(old), old)
    copy = await keep_copy(private_redis)
    await store.put(media_digest(new), new)
    await go_back_to(private_redis, copy)
    with contextlib.suppress(Unavailable):
        await store.renew([media_digest(old)])
    both = [media_digest(old), media_digest(new)]
    assert await store.renew(both) == both[1:]
    with pytest.raises(NotFound):
        await store.get(both[1])
    for _ in range(2):
        await store.put(both[1], new)
    assert await store.get(both[1]) == new and await store.get(both[0]) == old
    assert await total(redis) == 20
    await redis.aclose()
