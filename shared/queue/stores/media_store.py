"""Raw media bytes in Redis, by the digest of their content, so that no crash of a process loses a request's images.

    t:media:{<digest>}     list   the bytes in pieces of 1 MiB; expires 15 minutes after its last renewal
    t:media-name:{<digest of tenant and name>}
                           str    the digest of the bytes that a tenant has given a name; expires likewise
    t:{media}:expiry       zset   digest -> when it stops being counted (ms, Redis TIME)
    t:{media}:sizes        hash   digest -> bytes
    t:{media}:total        str    sum of the sizes

The bytes are touched by commands on their own key alone, so a Redis Cluster spreads them. The
counters live in one slot and change only together, in one script, so the total cannot drift.
Counting ends after the bytes have expired.

A Redis that restarts without its last writes may have lost raw media whose request is put back. Services that have
its pixels or embeddings go on with them; where both are gone, too, the request ends with MEDIA_EXPIRED. When the
client sends the bytes again, they are stored again and counted once.
"""

import asyncio
import hashlib
from collections.abc import Iterable
from typing import cast

from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError, RedisError

from shared.errors import NotFound, Overloaded, Unavailable
from shared.queue.scripts import Scripts

DIGEST_BYTES = 32
PIECE_BYTES = 1 << 20
TTL_MS = 15 * 60 * 1000

_COUNTED_LONGER_MS = 30_000
_COUNTERS = "t:{media}"


def media_digest(data: bytes) -> bytes:
    """32 bytes that name raw media: blake2b of the content."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


class MediaStore:
    """Raw media of all models of one Redis; `limit_bytes` bounds their sum."""

    def __init__(self, redis: Redis, limit_bytes: int = 1 << 30) -> None:
        self._redis = redis
        self._limit_bytes = limit_bytes
        self._scripts = Scripts(redis, _COUNTERS, checks_run=False)

    async def put(self, digest: bytes, data: bytes) -> None:
        """Stores the bytes, or gives them 15 more minutes if they are there.

        Raises Overloaded when the store is full, Unavailable when Redis is away.
        """
        # Concurrently: bytes that are stored already cost one round trip.
        counted, there = await asyncio.gather(
            self._scripts.call(
                "media_reserve",
                digest.hex(),
                len(data),
                TTL_MS + _COUNTED_LONGER_MS,
                self._limit_bytes,
            ),
            self._renewed(digest, -(-len(data) // PIECE_BYTES)),
        )
        if not counted:
            raise Overloaded(
                "MEDIA_STORE_FULL",
                f"media of waiting requests fill the limit of {self._limit_bytes} bytes"
                " (--media-store-bytes); retry later",
                retry_after_s="5",
            )
        if there:
            return
        key = _key(digest)
        pieces = [data[i : i + PIECE_BYTES] for i in range(0, len(data), PIECE_BYTES)]
        try:
            async with self._redis.pipeline(transaction=True) as pipeline:
                pipeline.delete(key)
                pipeline.rpush(key, *pieces)
                pipeline.pexpire(key, TTL_MS)
                await pipeline.execute()
        except OutOfMemoryError as error:
            raise Overloaded(
                "MEDIA_STORE_FULL", f"Redis has no memory for media: {error}", retry_after_s="5"
            ) from error
        except RedisError as error:
            raise Unavailable("REDIS_UNAVAILABLE", f"Redis: {error}") from error

    async def _renewed(self, digest: bytes, pieces: int) -> bool:
        """Gives bytes that are there, whole, 15 more minutes."""
        key = _key(digest)
        try:
            async with self._redis.pipeline(transaction=True) as pipeline:
                pipeline.llen(key)
                pipeline.pexpire(key, TTL_MS)
                found, renewed = await pipeline.execute()
        except RedisError as error:
            raise Unavailable("REDIS_UNAVAILABLE", f"Redis: {error}") from error
        return bool(found == pieces and renewed)

    async def get(self, digest: bytes) -> bytes:
        """The bytes. Raises NotFound when they have expired, Unavailable when Redis is away."""
        try:
            pieces = cast(list[bytes], await self._redis.lrange(_key(digest), 0, -1))
        except RedisError as error:
            raise Unavailable("REDIS_UNAVAILABLE", f"Redis: {error}") from error
        if not pieces:
            raise NotFound(
                "MEDIA_EXPIRED", f"the bytes of media {digest.hex()} have expired; send them again"
            )
        return b"".join(pieces)

    async def renew(self, digests: Iterable[bytes]) -> list[bytes]:
        """Gives media of living requests 15 more minutes; returns the digests that are gone.

        Raises Unavailable when Redis is away.
        """
        wanted = list(dict.fromkeys(digests))
        if not wanted:
            return []
        try:
            async with self._redis.pipeline(transaction=False) as pipeline:
                for digest in wanted:
                    pipeline.pexpire(_key(digest), TTL_MS)
                there = await pipeline.execute()
        except RedisError as error:
            raise Unavailable("REDIS_UNAVAILABLE", f"Redis: {error}") from error
        alive = [digest.hex() for digest, found in zip(wanted, there, strict=True) if found]
        if alive:
            await self._scripts.call("media_renew", TTL_MS + _COUNTED_LONGER_MS, *alive)
        return [digest for digest, found in zip(wanted, there, strict=True) if not found]

    async def name(self, tenant: str, name: str, digest: bytes) -> None:
        """Lets a tenant refer to bytes that are stored by a name of its own, for as long as they are kept unless
        they are renewed. Raises Unavailable when Redis is away.
        """
        try:
            await self._redis.set(_name_key(tenant, name), digest, px=TTL_MS)
        except RedisError as error:
            raise Unavailable("REDIS_UNAVAILABLE", f"Redis: {error}") from error

    async def named(self, tenant: str, name: str) -> bytes | None:
        """The bytes of a name; None where the tenant has stored none under it, or they have expired. Raises Unavailable
        when Redis is away.
        """
        try:
            digest = cast(bytes | None, await self._redis.get(_name_key(tenant, name)))
            pieces = (
                cast(list[bytes], await self._redis.lrange(_key(digest), 0, -1)) if digest else []
            )
        except RedisError as error:
            raise Unavailable("REDIS_UNAVAILABLE", f"Redis: {error}") from error
        return b"".join(pieces) or None


def _key(digest: bytes) -> str:
    return f"t:media:{{{digest.hex()}}}"


def _name_key(tenant: str, name: str) -> str:
    joined = f"{len(tenant)}:{tenant}{name}".encode()
    return f"t:media-name:{{{hashlib.blake2b(joined, digest_size=DIGEST_BYTES).hexdigest()}}}"
