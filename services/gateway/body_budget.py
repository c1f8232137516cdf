"""A budget of bytes: one for all request bodies that are being read or prepared, in REST and gRPC together."""

import asyncio
from collections import deque

from shared.errors import Unavailable


class BodyBudget:
    """Counts bytes. It has no lock: all callers are on one event loop."""

    def __init__(self, limit: int) -> None:
        """`limit` in bytes."""
        self._limit = limit
        self._held = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def held(self) -> int:
        """Bytes that are held now."""
        return self._held

    def take(self, size: int) -> None:
        """Takes so many bytes of the budget. Raises Unavailable if there are not as many left."""
        if self._held + size > self._limit:
            raise self._full()
        self._held += size

    async def wait_for(self, size: int, timeout_s: float) -> None:
        """The same, but waits in turn for at most `timeout_s` if the budget is used up. An eighth of the budget is left
        to `take`: callers that wait reserve the largest size, and may use less.
        """
        if not self._waiting and self._has_room(size):
            self._held += size
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            async with asyncio.timeout(timeout_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():  # it came together with the end of the wait
                self.give_back(size)
            else:
                self._waiting = deque(one for one in self._waiting if one[1] is not turn)
                self._let_in()
            if isinstance(error, TimeoutError):
                raise self._full() from None
            raise

    def give_back(self, size: int) -> None:
        """Returns so many bytes."""
        self._held -= size
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting and self._has_room(self._waiting[0][0]):
            size, turn = self._waiting.popleft()
            if not turn.done():
                self._held += size
                turn.set_result(None)

    def _has_room(self, size: int) -> bool:
        return self._held + size <= self._limit - self._limit // 8

    def _full(self) -> Unavailable:
        return Unavailable(
            "TOO_MANY_BODIES",
            f"this gateway holds {self._held} bytes of request bodies, of {self._limit} at most"
            " (--max-body-bytes-in-flight): retry in a moment",
        )
