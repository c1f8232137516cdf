"""When owned requests run out of time: the first token too late, or the whole answer."""

import asyncio
import heapq
from collections.abc import Callable, Iterator

from services.scheduler.core.sequence import Ending, EndReason, Error
from services.scheduler.output.request import Request

_SMALL = 256
DEADLINE_EXCEEDED = 4  # number of gRPC


def _late(reason: str, message: str) -> Ending:
    return Ending(EndReason.ERROR, error=Error(reason, message, DEADLINE_EXCEEDED))


REQUEST_TIMEOUT = _late(
    "REQUEST_TIMEOUT", "the request's time ran out; ask for fewer tokens or allow more time"
)
FIRST_TOKEN_TIMEOUT = _late(
    "FIRST_TOKEN_TIMEOUT", "no token came within the time that the request allows; retry later"
)


class Deadlines:
    """Ends what is late. Times count from the arrival by the clock of Redis, and run on by this process's own: no
    service compares its clock with another's.

    `end(request_id, ending)` is called once the time is over. A request that has ended before is passed over.
    """

    def __init__(
        self, find: Callable[[str], Request | None], end: Callable[[str, Ending], None]
    ) -> None:
        self._find = find
        self._end = end
        self._heap: list[tuple[float, int, str, Ending]] = []
        self._count = 0  # orders entries of equal times
        self._max_entries = _SMALL  # entries, before those of ended requests are looked for
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._heap)

    def watch(self, request: Request) -> Ending | None:
        """Watches a request that has just been taken. Returns an ending at once where it is too late already."""
        if len(self._heap) > self._max_entries:
            self._forget_ended()
        now = asyncio.get_running_loop().time()
        for allowed_ms, ending in _limits(request):
            left_s = (allowed_ms - request.arrived_ago_ms) / 1000
            if left_s <= 0:
                return ending
            self._count += 1
            heapq.heappush(self._heap, (now + left_s, self._count, request.request_id, ending))
        self._set_timer()
        return None

    def close(self) -> None:
        """Ends no request any more."""
        self._heap.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _forget_ended(self) -> None:
        self._heap = [entry for entry in self._heap if self._find(entry[2]) is not None]
        heapq.heapify(self._heap)
        self._max_entries = max(_SMALL, 2 * len(self._heap))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._heap:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(self._heap[0][0], self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        while self._heap and self._heap[0][0] <= now:
            _, _, request_id, ending = heapq.heappop(self._heap)
            request = self._find(request_id)
            if request is not None and not (ending is FIRST_TOKEN_TIMEOUT and request.has_begun):
                self._end(request_id, ending)
        self._set_timer()


def _limits(request: Request) -> Iterator[tuple[int, Ending]]:
    """Milliseconds from arrival, where the request has such a limit."""
    spec = request.spec
    if spec.timeout_ms:
        yield spec.timeout_ms, REQUEST_TIMEOUT
    if spec.first_token_timeout_ms and not request.has_begun:
        yield spec.first_token_timeout_ms, FIRST_TOKEN_TIMEOUT
