"""The registers of a system's services in Redis: whether they still contain a process that was killed."""

import contextlib
from typing import Any

from redis.exceptions import RedisError

from shared.queue import connect
from shared.queue.keys import Keys
from tessera.scheduler.v1.scheduler_pb2 import GetLoadResponse


class Registers:
    """Only reads. Services without a lease (their callers see a broken call at once) are never reported as missing."""

    def __init__(self, redis_url: str, model: str) -> None:
        self._redis: Any = connect(redis_url)  # the library's types leave open whether it decodes
        self._keys = Keys(model)

    async def instance(self, service: str, name: str) -> str:
        """The incarnation behind a process's unix socket; empty if it is not known."""
        if service not in ("decoder", "scheduler"):
            return ""
        with contextlib.suppress(RedisError):
            addresses = await self._redis.hgetall(f"{self._keys.prefix}:addresses:{service}")
            scores = dict(
                await self._redis.zrange(
                    f"{self._keys.prefix}:instances:{service}", 0, -1, withscores=True
                )
            )
            found = [
                i
                for i, address in addresses.items()
                if address.endswith(b"/%s.sock" % name.encode())
            ]
            found.sort(key=lambda i: scores.get(i, 0.0))
            return found[-1].decode() if found else ""
        return ""

    async def misses(self, service: str, instance: str) -> bool:
        """Whether the services that work with a process have noticed that it is gone: no scheduler has the decoder, or
        the scheduler's lease has been taken away.
        """
        with contextlib.suppress(RedisError):
            if service == "scheduler":
                score = await self._redis.zscore(f"{self._keys.prefix}:scheds", instance)
                return score is None
            loads = await self._redis.hgetall(self._keys.load)
            decoders = [
                d for load in loads.values() for d in GetLoadResponse.FromString(load).decoders
            ]
            return instance not in {decoder.decoder_id for decoder in decoders}
        return False

    async def lost_decoders(self) -> dict[str, int]:
        """Request id -> how many decoders were lost while they computed something of it, for every request in Redis."""
        prefix = f"{self._keys.prefix}:r:"
        found = {}
        async for key in self._redis.scan_iter(match=f"{prefix}*", count=1000):
            value = await self._redis.hget(key, "lost_decoders")
            found[key.decode().removeprefix(prefix)] = int(value or 0)
        return found

    async def close(self) -> None:
        """Closes the connection."""
        await self._redis.aclose()
