"""Writes to the token log, off the way of the next plan: one call at a time, with all that has come meanwhile."""

import asyncio
from collections.abc import Callable, Sequence

import structlog

from shared.errors import Unavailable
from shared.queue import Append, AppendCode, Queue

log = structlog.get_logger(__name__)

_RETRY_S = 0.2


class LogWriter:
    """Group commit in order. While Redis is away everything waits here and nothing is lost.

    `on_refused(request_id)`: the request has another owner, drop it. `on_cancel(request_id)`: its client has cancelled.
    `on_gap(append, length)`: the log is shorter than believed; returns what to send instead, or None if it is gone.
    """

    def __init__(
        self,
        queue: Queue,
        scheduler_id: str,
        *,
        on_refused: Callable[[str], None],
        on_cancel: Callable[[str], None],
        on_gap: Callable[[Append, int], Append | None],
    ) -> None:
        self._queue = queue
        self._scheduler_id = scheduler_id
        self._on_refused = on_refused
        self._on_cancel = on_cancel
        self._on_gap = on_gap
        self._pending: list[Append] = []
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def submit(self, appends: Sequence[Append]) -> None:
        """Queues what one step gave. Returns at once."""
        if appends:
            self._pending.extend(appends)
            self._idle.clear()
            self._work.set()

    async def flush(self) -> None:
        """Waits until all that was submitted is in the log."""
        await self._idle.wait()

    async def run(self) -> None:
        """Writes until cancelled."""
        while True:
            await self._work.wait()
            self._work.clear()
            while self._pending:
                batch, self._pending = self._pending, []
                try:
                    answers = await self._queue.append(self._scheduler_id, batch)
                except Unavailable as error:
                    log.warning("token log is away, holding on", error=error.message)
                    self._pending = batch + self._pending
                    await asyncio.sleep(_RETRY_S)
                    continue
                for append, answer in zip(batch, answers, strict=True):
                    self._react(append, answer.code, answer.length)
            self._idle.set()

    def _react(self, append: Append, code: AppendCode, length: int) -> None:
        if code is AppendCode.REFUSED:
            self._on_refused(append.request_id)
        elif code is AppendCode.CANCEL and append.ending is None:
            self._on_cancel(append.request_id)
        elif code is AppendCode.GAP:
            again = self._on_gap(append, length)
            if again is not None:
                self._pending.append(again)
