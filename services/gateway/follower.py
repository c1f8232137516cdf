"""Follows the token log: one subscription for the whole gateway, one `Follow` for each request it
answers.

The channel is a hint, the log is the truth. Each follow keeps a cursor, trims what it has, reads
the log again when something is missing, and everything that has been silent for a second is read
again too, so that a lost message costs a second. A wrong overlap means that Redis came back with
another history: the stream ends then, never in a silent mix.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterable
from typing import Self

import structlog

from shared import tasks, token_log
from shared.errors import Internal, NotFound, ServingError, Unavailable
from shared.queue import LogNews, Queue, TokenChannel
from tessera.common.v1.ending_pb2 import Ending

log = structlog.get_logger(__name__)

SILENCE_S = 10.0
_REREAD_S = 1.0
_RECONNECT_S = 0.2
_RESTORE_S = 8.0
_READ_AT_ONCE = 256
_STRIDE = token_log.stride(None)


class Follow:
    """The tokens and the ending of one choice, as far as they are known here. One consumer at a
    time.
    """

    def __init__(self, follower: "Follower", request_id: str, *, new: bool = True) -> None:
        self.request_id = request_id
        self.tokens: list[int] = []
        self.ending: Ending | None = None
        self.heard_at = time.monotonic()
        self.needs_read = False
        # Before admission there is nothing to read, and nothing there is no error.
        self.admitted = not new
        self._was_admitted_here = new
        self._missing_since = 0.0
        self._follower = follower
        self._given = 0
        self._failure: ServingError | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> list[int]:
        """Waits for news: the tokens since the last call. Empty with `ending` still None after 10 s
        of silence.

        When `ending` is set, these were the last. Raises Internal if the log's history changed.
        """
        if self._given == len(self.tokens) and self.ending is None and self._failure is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._failure is not None:
            raise self._failure
        fresh = self.tokens[self._given :]
        self._given = len(self.tokens)
        return fresh

    def offer(self, start: int, records: bytes, ending: Ending | None, *, whole: bool) -> None:
        """Takes records from index `start` on. `whole` says that nothing can be missing before an
        ending.
        """
        fresh = token_log.decode_tokens(records)
        known = len(self.tokens)
        end = start + len(fresh)
        if start > known:
            self.needs_read = True
            return
        if start < known and fresh[: known - start] != self.tokens[start:end]:
            self._diverged()
            return
        if end > known:
            self.tokens += fresh[known - start :] if known > start else fresh
        if ending is not None and whole and end < known:
            self._diverged()
        elif ending is not None:
            # An event of an ending without tokens does not say how long the log is: read it once
            # more.
            if whole or end == len(self.tokens) > 0:
                self.ending = ending
            else:
                self.needs_read = True
        if end > known or self.ending is not None:
            self.heard_at = time.monotonic()
            self.wake()

    def offer_log(self, found: LogNews | None, after: int) -> None:
        """Takes what a reading from index `after` on gave."""
        self.needs_read = False
        if found is None:
            self._miss()
            return
        self._missing_since = 0.0
        self.offer(after, found.records, found.ending, whole=True)

    def wake(self) -> None:
        """Lets `next` return."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Stops following."""
        self._follower.forget(self)

    def _miss(self) -> None:
        """Not there. One that was admitted may have been in the tail that a killed Redis lost; its
        owner puts it back within seconds.
        """
        now = time.monotonic()
        self._missing_since = self._missing_since or now
        if not self._was_admitted_here or now - self._missing_since > _RESTORE_S:
            self._fail(NotFound("REQUEST_NOT_FOUND", f"the request {self.request_id} is gone"))

    def _diverged(self) -> None:
        self._fail(
            Internal(
                "STREAM_DIVERGED",
                f"Redis came back with another history of {self.request_id}; send it again",
            )
        )

    def _fail(self, failure: ServingError) -> None:
        self._failure = failure
        self.wake()


class Follower:
    """All follows of a gateway. `async with` subscribes; leaving it ends the subscription."""

    def __init__(self, queue: Queue, channel: TokenChannel) -> None:
        self._queue = queue
        self._channel = channel
        # Two clients may follow one request.
        self._follows: dict[str, set[Follow]] = {}
        self._reading: set[Follow] = set()
        self._wanted = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.create_task(self._listen()),
            asyncio.create_task(self._read_wanted()),
            asyncio.create_task(self._find_silent()),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        await tasks.end(*self._tasks)

    def __len__(self) -> int:
        return sum(map(len, self._follows.values()))

    def follow(self, request_id: str, *, new: bool) -> Follow:
        """Follows a request from its first token on: one that is about to be admitted, or one
        already in the log.
        """
        follow = Follow(self, request_id, new=new)
        self._follows.setdefault(request_id, set()).add(follow)
        if not new:
            self._want(follow)
        return follow

    def forget(self, follow: Follow) -> None:
        """Ends a follow."""
        follows = self._follows.get(follow.request_id)
        if follows is not None:
            follows.discard(follow)
            if not follows:
                del self._follows[follow.request_id]
        self._reading.discard(follow)

    async def _listen(self) -> None:
        away = False
        while True:
            try:
                async for batch in self._channel.batches():
                    away = False
                    for event in batch.events:
                        follows = self._follows.get(event.request_id)
                        if follows and event.choice == 0:
                            ending = event.ending if event.HasField("ending") else None
                            self._offer(follows, event.start, event.records, ending)
            except Unavailable as error:
                if not away:
                    log.warning("token channel lost", error=error.message)
                away = True
            # What was said meanwhile is in the log.
            self._want(*self._all())
            await asyncio.sleep(_RECONNECT_S)

    def _offer(
        self, follows: Iterable[Follow], start: int, records: bytes, ending: Ending | None
    ) -> None:
        for follow in follows:
            follow.offer(start, records, ending, whole=False)
            if follow.needs_read:
                self._want(follow)

    async def _find_silent(self) -> None:
        while True:
            await asyncio.sleep(_REREAD_S)
            now = time.monotonic()
            for follow in self._all():
                silent_s = now - follow.heard_at
                if silent_s >= _REREAD_S:
                    self._want(follow)
                if silent_s >= SILENCE_S:
                    follow.heard_at = now
                    follow.wake()

    async def _read_wanted(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            wanted, self._reading = list(self._reading), set()
            for start in range(0, len(wanted), _READ_AT_ONCE):
                with contextlib.suppress(Unavailable):  # the next silence asks again
                    await self._read(wanted[start : start + _READ_AT_ONCE])

    async def _read(self, wanted: list[Follow]) -> None:
        cursors = [(follow.request_id, 0, len(follow.tokens)) for follow in wanted]
        news = await self._queue.read_news(cursors, stride=_STRIDE)
        for follow, (_, _, after), found in zip(wanted, cursors, news, strict=True):
            follow.offer_log(found, after)

    def _want(self, *follows: Follow) -> None:
        self._reading.update(follows)
        if self._reading:
            self._wanted.set()

    def _all(self) -> list[Follow]:
        return [f for follows in self._follows.values() for f in follows if f.admitted]
