"""The errors that requests ended with lately, for GET /v1/system: each gateway writes its own into Redis."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from shared.environment import monotonic
from shared.errors import ServingError, Unavailable
from shared.net import supervise
from shared.net.supervise import Background
from shared.queue.stores.error_store import ErrorStore

# Of one gateway between two writes; earlier ones make room.
_MOST = 50
_WRITE_S = 0.5


class RecentErrors:
    """Those of one gateway that are yet to be written. Errors go without their messages, which may quote what a client
    sent."""

    def __init__(self, gateway: str = "") -> None:
        """`gateway` is the process's incarnation."""
        self._gateway = gateway
        self._unwritten: deque[tuple[float, dict[str, Any]]] = deque(maxlen=_MOST)
        self._count = 0
        self._turn = asyncio.Lock()

    def note(self, error: ServingError, path: str = "", request_id: str = "") -> None:
        """A request ended with this error; `path` is empty for one that had been accepted. Never waits."""
        self._count += 1
        content = {
            "number": self._count,
            "gateway": self._gateway,
            "status": error.http_status,
            "code": error.reason.lower(),
            "path": path[:200],
            "request_id": request_id,
        }
        self._unwritten.append((monotonic(), content))

    async def flush(self, store: ErrorStore) -> None:
        """Writes what there is now. Raises Unavailable: it is kept then."""
        async with self._turn:
            if not self._unwritten:
                return
            taken = tuple(self._unwritten)
            now = monotonic()
            await store.add([(content, round(1000 * (now - at))) for at, content in taken])
            while self._unwritten and self._unwritten[0][1]["number"] <= taken[-1][1]["number"]:
                self._unwritten.popleft()

    @contextlib.asynccontextmanager
    async def written(self, store: ErrorStore) -> AsyncIterator[None]:
        """Inside of the block they are written twice a second where there are any, and once more at its end."""
        work = Background("recent errors", lambda: self._write(store))
        try:
            yield
        finally:
            await supervise.end(work)
            with contextlib.suppress(Unavailable):
                await self.flush(store)

    async def _write(self, store: ErrorStore) -> None:
        while True:
            with contextlib.suppress(Unavailable):  # it waits for the next turn
                await self.flush(store)
            await asyncio.sleep(_WRITE_S)
