"""Followers of the token channel that subscribe before the first message and wait for the last."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

from redis.asyncio import Redis

from shared.net import tasks
from shared.queue import TokenChannel
from shared.queue.keys import Keys
from tessera.scheduler.v1.queue_pb2 import LogBatch, LogEvent

NOTHING = LogBatch().SerializeToString()  # a message that says nothing about any request


class Heard:
    """Messages of the token channel so far."""

    def __init__(self) -> None:
        self.events: list[LogEvent] = []
        self.endings = Counter[tuple[str, int]]()  # of each request and choice
        self._more = asyncio.Event()

    def of(self, request_id: str) -> list[LogEvent]:
        """The events of a request, in order."""
        return [event for event in self.events if event.request_id == request_id]

    async def ended(self, request_id: str, choices: int = 1) -> list[LogEvent]:
        """The events of a request, when the last of its choices has ended."""
        while any(not self.endings[request_id, choice] for choice in range(choices)):
            await self.more()
        return self.of(request_id)

    async def more(self) -> None:
        """Waits for the next message."""
        self._more.clear()
        await self._more.wait()

    async def listen(self, redis: Redis, keys: Keys) -> None:
        """Follows the channel until cancelled."""
        async for batch in TokenChannel(redis, keys).batches():
            self.events += batch.events
            for event in batch.events:
                if event.HasField("ending"):
                    self.endings[event.request_id, event.choice] += 1
            self._more.set()


@contextlib.asynccontextmanager
async def listening(redis: Redis, keys: Keys) -> AsyncIterator[Heard]:
    """A listener that has heard a message before the block begins: nothing said inside it is missed."""
    heard = Heard()
    listener = asyncio.create_task(heard.listen(redis, keys))
    first = asyncio.create_task(heard.more())
    try:
        while not first.done():
            await redis.publish(keys.token_channel, NOTHING)
            await asyncio.wait([listener, first], timeout=0.05, return_when="FIRST_COMPLETED")
            if listener.done():
                listener.result()  # raises what ended it
        yield heard
    finally:
        await tasks.end(listener, first)
