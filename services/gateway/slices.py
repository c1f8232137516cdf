"""Long work on the event loop, such as writing a large answer: in slices, of which one iteration of the loop does a
few, whomever they are for, so that what is short waits for milliseconds alone.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator

# Of a slice of a millisecond or two each.
_AT_ONCE = 2
# Characters of JSON, and as how many more each piece counts.
_SLICE_CHARS = 48 << 10
_PIECE_CHARS = 256


class Slices:
    """The slices of one event loop."""

    def __init__(self) -> None:
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def turn(self) -> None:
        """Returns at once while the current iteration of the loop has had few slices, else later, in the order of the
        calls.
        """
        if self._taken < _AT_ONCE and not self._waiting:
            self._count()
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    async def joined(self, pieces: Iterator[str]) -> AsyncIterator[bytes]:
        """Pieces of text, many of them small, as fewer of some length: each is made in a turn of its own."""
        some: list[str] = []
        size = 0
        for piece in pieces:
            some.append(piece)
            size += _PIECE_CHARS + len(piece)
            if size >= _SLICE_CHARS:
                yield "".join(some).encode()
                some.clear()
                size = 0
                await self.turn()
        if some:
            yield "".join(some).encode()

    def _count(self) -> None:
        if not self._taken:
            asyncio.get_running_loop().call_soon(self._renew)
        self._taken += 1

    def _renew(self) -> None:
        """The next iteration: those who wait run in the one behind it."""
        self._taken = 0
        while self._waiting and self._taken < _AT_ONCE:
            turn = self._waiting.popleft()
            if not turn.done():  # its task may have been cancelled
                self._count()
                turn.set_result(None)
