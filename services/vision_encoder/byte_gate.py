"""A bound on bytes that are in use at a time."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable


class ByteGate:
    """Lets users in, in order of arrival, while their bytes are within a limit; one alone whatever it has."""

    def __init__(self, limit: Callable[[], int]) -> None:
        """`limit` is asked each time somebody comes or goes."""
        self._limit = limit
        self._used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def held(self, size: int) -> AsyncIterator[None]:
        """Waits until there is room for `size` bytes and counts them until the block ends."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave(size)
            else:
                with contextlib.suppress(ValueError):  # passed over already
                    self._waiting.remove((size, turn))
                self._admit()
            raise
        try:
            yield
        finally:
            self._leave(size)

    def _leave(self, size: int) -> None:
        self._used -= size
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            size, turn = self._waiting[0]
            if self._used and self._used + size > self._limit():
                return
            self._waiting.popleft()
            if not turn.done():
                self._used += size
                turn.set_result(None)
