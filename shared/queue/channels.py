"""The channels on which Redis publishes: hints; the log decides."""

from collections.abc import AsyncIterator

from redis.asyncio import Redis

from shared.net.redis.connection import Subscription
from shared.queue.keys import Keys
from tessera.scheduler.v1.queue_pb2 import LogBatch


class TokenChannel:
    """Follows the token channel. A hint: what is missed is read from the log."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys

    async def batches(self) -> AsyncIterator[LogBatch]:
        """Yields what is appended from now on. Raises Unavailable when the connection breaks: call again."""
        async for message in _messages(self._redis, self._keys.token_channel):
            yield LogBatch.FromString(message)


class ControlChannel:
    """Follows the control channel: work arrived, a running request was cancelled."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys

    async def messages(self) -> AsyncIterator[str | None]:
        """Yields the id of a cancelled request, or None for "there is work". Raises Unavailable on a break."""
        async for message in _messages(self._redis, self._keys.control_channel):
            yield str(message[1:], "ascii") if message[:1] == b"c" else None


async def _messages(redis: Redis, channel: str) -> AsyncIterator[bytes]:
    subscription = Subscription(redis, channel)
    try:
        await subscription.open()
        while True:
            for message in await subscription.messages():
                yield message
    finally:
        await subscription.give_back()
