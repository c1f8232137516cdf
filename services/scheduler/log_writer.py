"""Writes to the token log, off the way of the next plan: one call at a time, with all that has come meanwhile."""

import asyncio
from collections.abc import Callable

import structlog

from services.scheduler.choice import Choice
from shared.errors import Unavailable
from shared.queue import AppendAnswer, AppendCode, Queue

log = structlog.get_logger(__name__)

_RETRY_S = 0.2


class LogWriter:
    """Group commit in order. While Redis is away everything waits here and nothing is lost.

    `on_refused(request_id)`: the request has another owner, drop it. `on_cancel(request_id)`: its client has cancelled.
    A log that turns out shorter than believed is written again from its end.
    """

    def __init__(
        self,
        queue: Queue,
        scheduler_id: str,
        *,
        on_refused: Callable[[str], None],
        on_cancel: Callable[[str], None],
    ) -> None:
        self._queue = queue
        self._scheduler_id = scheduler_id
        self._on_refused = on_refused
        self._on_cancel = on_cancel
        self._batches: list[bytes] = []
        self._choices: list[Choice] = []
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def submit(self, batch: bytes, choices: list[Choice]) -> None:
        """Queues what one step gave: a serialized LogBatch, and whose each of its events is. Returns at once."""
        if choices:
            self._batches.append(batch)
            self._choices += choices
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
            while self._batches:
                batches, self._batches = self._batches, []
                choices, self._choices = self._choices, []
                try:
                    # Batches one after the other are one batch with all their events.
                    batch = b"".join(batches)
                    answers = await self._queue.append_events(self._scheduler_id, batch)
                except Unavailable as error:
                    log.warning("token log is away, holding on", error=error.message)
                    self._batches = batches + self._batches
                    self._choices = choices + self._choices
                    await asyncio.sleep(_RETRY_S)
                    continue
                self._react(choices, answers)
            self._idle.set()

    def _react(self, choices: list[Choice], answers: list[tuple[int, AppendAnswer]]) -> None:
        gaps: dict[Choice, int] = {}
        for index, answer in answers:
            choice = choices[index]
            match answer.code:
                case AppendCode.REFUSED:
                    self._on_refused(choice.request.request_id)
                case AppendCode.CANCEL:
                    self._on_cancel(choice.request.request_id)
                case AppendCode.GAP:
                    gaps[choice] = answer.length
        for choice, length in gaps.items():
            log.warning("the log had lost its end", request=choice.request.request_id)
            self.submit(choice.again(length), [choice])
