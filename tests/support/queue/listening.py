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

NOTHING = LogBatch().SerializeToString()  # a message without an event


class Received:
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
            await self.next_message()
        return self.of(request_id)

    async def next_message(self) -> None:
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
async def listening(redis: Redis, keys: Keys) -> AsyncIterator[Received]:
    """A listener that has received a message before the block begins: nothing published inside it is missed."""
    received = Received()
    listener = asyncio.create_task(received.listen(redis, keys))
    first = asyncio.create_task(received.next_message())
    try:
        while not first.done():
            await redis.publish(keys.token_channel, NOTHING)
            await asyncio.wait([listener, first], timeout=0.05, return_when="FIRST_COMPLETED")
            if listener.done():
                listener.result()  # raises what ended it
        yield received
    finally:
        await tasks.end(listener, first)
