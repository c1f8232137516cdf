"""Receives the messages of gRPC calls: in turns of connections, within a budget, and without waiting for peers that
send nothing.

gRPC assembles a message in memory and hands it over whole. So a call is not read until the budget has room for the
largest message, and until then its peer can fill the flow control window of its stream and no more. While others wait
for room, a call whose connection brings nothing loses its place.
"""

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

from services.gateway.api.tessera.peer_progress import PeerProgress
from services.gateway.body_budget import BodyBudget
from services.gateway.errors import TooSlow
from shared.errors import InvalidRequest

_ROOM_S = 10.0
_RECEIVE_S = 20.0
_LOOK_S = 0.1
# For how long a connection may bring less than `_LEAST_BYTES_PER_S` for each of its calls. One that has brought no more
# than small messages yet does not wait for permission to send on, as a large one may for a round trip.
_SILENT_S = 1.0
_SMALL_SILENT_S = 0.3
_SMALL_BYTES = 16 << 10
_LEAST_BYTES_PER_S = 16 << 10


@dataclass(eq=False)
class _Call:
    """One that is being received: its connection, and when that had last brought enough."""

    peer: str
    since: float
    seen_bytes: int | None
    limit: asyncio.Timeout
    is_silent: bool = False


class Reception:
    """All calls that share one budget."""

    def __init__(self, budget: BodyBudget, most_bytes: int) -> None:
        """A message may have `most_bytes`."""
        self.budget = budget
        self.most_bytes = most_bytes
        self._turns = _Turns()
        self._progress = PeerProgress()
        self._calls: dict[_Call, None] = {}

    async def receive(self, peer: str, requests: AsyncIterator[bytes]) -> bytes:
        """The single message of a call; the budget then holds `most_bytes` for it.

        Raises Unavailable (no room), TooSlow, InvalidRequest; the budget then holds nothing for it.
        """
        end = asyncio.get_running_loop().time() + _ROOM_S
        try:
            async with asyncio.timeout_at(end), self._turns.turn(peer):
                await self._room(end)
        except TimeoutError:
            await self.budget.wait_for(self.most_bytes, 0.0)  # says why not
        try:
            return await self._received(peer, requests)
        except BaseException:
            self.budget.give_back(self.most_bytes)
            raise

    async def _received(self, peer: str, requests: AsyncIterator[bytes]) -> bytes:
        call = _Call(peer, asyncio.get_running_loop().time(), None, asyncio.timeout(_RECEIVE_S))
        self._calls[call] = None
        try:
            async with call.limit:
                raw = await anext(requests)
                # Read to its end: gRPC's reader and its context hold each other until then.
                if await anext(requests, None) is not None:
                    raise InvalidRequest("TOO_MANY_MESSAGES", "this method takes one message")
                return raw
        except TimeoutError:
            if call.is_silent:
                raise TooSlow(
                    "BODY_TIMEOUT", "no message came while other calls waited: send it at once"
                ) from None
            raise TooSlow("BODY_TIMEOUT", f"no message came within {_RECEIVE_S:.0f} s") from None
        except StopAsyncIteration:
            raise InvalidRequest("NO_MESSAGE", "the call ended without a message") from None
        finally:
            del self._calls[call]

    async def _room(self, end: float) -> None:
        """Waits for room until `end`, for which silent calls lose theirs."""
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle

        def look() -> None:
            nonlocal timer
            now = loop.time()
            for call in self._calls:  # what this process is late by is no silence of theirs
                call.since += now - timer.when()
            timer = loop.call_later(_LOOK_S, look)
            self._look(now)

        timer = loop.call_later(_LOOK_S, look)
        try:
            await self.budget.wait_for(self.most_bytes, max(end - loop.time(), 0.0))
        finally:
            timer.cancel()

    def _look(self, now: float) -> None:
        by_peer: dict[str, list[_Call]] = {}
        for call in self._calls:
            by_peer.setdefault(call.peer, []).append(call)
        for peer, calls in by_peer.items():
            received = self._progress.received(peer)
            if received is None:
                continue
            for call in calls:
                self._judge(call, received, now, share=len(calls))

    def _judge(self, call: _Call, received: int, now: float, share: int) -> None:
        silent_s = now - call.since
        if received <= _SMALL_BYTES:
            is_silent = silent_s > _SMALL_SILENT_S
        elif call.seen_bytes is None or (
            received - call.seen_bytes >= _LEAST_BYTES_PER_S * max(silent_s, _LOOK_S) * share
        ):
            call.since, call.seen_bytes = now, received
            return
        else:
            is_silent = silent_s > _SILENT_S
        if is_silent and not call.is_silent:
            call.is_silent = True
            with contextlib.suppress(RuntimeError):  # it ends in this moment
                call.limit.reschedule(now)


class _Turns:
    """A lock whose next holder is of the connection that has waited longest since its last turn."""

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @contextlib.asynccontextmanager
    async def turn(self, peer: str) -> AsyncIterator[None]:
        """Waits for the lock and holds it."""
        if self._is_taken:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(peer, deque()).append(turn)
            try:
                await turn
            except BaseException:
                if turn.done() and not turn.cancelled():
                    self._pass_on()
                raise
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            peer, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[peer] = turns  # behind the others
            if not turn.done():
                turn.set_result(None)
                return
        self._is_taken = False
