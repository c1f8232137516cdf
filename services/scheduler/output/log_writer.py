"""Writes to the token log in the background: one call at a time, with all events that have come meanwhile."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

import structlog

from services.scheduler.output.choice import Choice
from shared.environment import monotonic
from shared.errors import Unavailable
from shared.queue import AppendAnswer, AppendCode, Queue
from shared.telemetry.outage import Outage
from shared.telemetry.timeline import Timelines

log = structlog.get_logger(__name__)

_RETRY_S = 0.2
# What has piled up while Redis was away goes in several calls: a script blocks all other clients.
_MAX_BYTES = 128 << 10


class LogWriter:
    """Group commit in order. While Redis is away everything waits here and nothing is lost.

    `on_refused(request_id)`: the request has another owner, drop it. `on_cancel(request_id)`: its client has cancelled.
    A log that turns out shorter than believed is written again from its end.
    """

    def __init__(
        self,
        queue: Queue,
        scheduler_id: str,
        timelines: Timelines,
        *,
        on_refused: Callable[[str], None],
        on_cancel: Callable[[str], None],
        is_settled: Callable[[], bool] = lambda: True,
        settled: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`is_settled()` is false while Redis has lost what is being restored; `settled()` waits for it."""
        self._queue = queue
        self._scheduler_id = scheduler_id
        self._timelines = timelines
        # The submission, the request, what of it, and since when: few of many writes.
        self._noted: deque[tuple[int, str, str, float]] = deque()
        self._on_refused = on_refused
        self._on_cancel = on_cancel
        self._is_settled = is_settled
        self._settled = settled
        self._batches: deque[tuple[bytes, list[Choice]]] = deque()
        self._writing: list[Choice] = []  # of the call in progress
        self._work = asyncio.Event()
        self._outage = Outage(log, "the token log cannot be written, trying again")
        self._num_submitted = 0
        self._num_written = 0
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []

    def submit(
        self, batch: bytes, choices: list[Choice], noted: Iterable[tuple[str, str]] = ()
    ) -> None:
        """Queues what one step gave: a serialized LogBatch, and the choice of each of its events. Returns at once.
        `noted`: requests of which timelines are to say how long this took, and what of them it is."""
        if choices:
            self._batches.append((batch, choices))
            self._num_submitted += 1
            for request_id, what in noted:
                self._noted.append((self._num_submitted, request_id, what, monotonic()))
            self._work.set()

    async def flush(self) -> None:
        """Waits until all that was submitted before is in the log, whatever is submitted meanwhile."""
        if self._num_written < self._num_submitted:
            done = asyncio.get_running_loop().create_future()
            self._waiters.append((self._num_submitted, done))
            await done

    def pending(self) -> set[str]:
        """Requests of which something is yet to be written."""
        batches = [choices for _, choices in self._batches]
        return {c.request.request_id for some in (self._writing, *batches) for c in some}

    async def run(self) -> None:
        """Writes until cancelled."""
        while True:
            await self._work.wait()
            self._work.clear()
            while self._batches:
                if not await self._write_next():
                    await self._wait_to_retry()

    async def _write_next(self) -> bool:
        """Writes what has come. Returns whether it is written. What it refers to is let go of when it returns: the last
        requests of a scheduler that has nothing more to do are freed too.
        """
        count, batch, choices = self._next()
        self._writing = choices
        answers = await self._write(batch)
        self._writing = []
        if answers is None:
            self._batches.appendleft((batch, choices))
            self._num_written += count - 1  # they are one batch from now on
            return False
        self._num_written += count
        while self._noted and self._noted[0][0] <= self._num_written:
            _, request_id, what, since = self._noted.popleft()
            self._timelines.span(request_id, "log", since, of=what)
        self._react(choices, answers)
        self._wake()
        return True

    async def _write(self, batch: bytes) -> list[tuple[int, AppendAnswer]] | None:
        """The answers, or None where the same must be written again: what is there already is left out then."""
        try:
            answers = await self._queue.append_events(self._scheduler_id, batch)
        except Unavailable as error:
            self._outage.note(error.message)
            return None
        self._outage.over()
        refused = any(answer.code is AppendCode.REFUSED for _, answer in answers)
        return None if refused and not self._is_settled() else answers

    async def _wait_to_retry(self) -> None:
        if self._settled is not None and not self._is_settled():
            await self._settled()
        else:
            await asyncio.sleep(_RETRY_S)

    def _next(self) -> tuple[int, bytes, list[Choice]]:
        """What one call writes: batches one after the other are one batch with all their events."""
        batch, choices = self._batches.popleft()
        if not self._batches:
            return 1, batch, choices
        size, parts, choices = len(batch), [batch], list(choices)
        while self._batches and size + len(self._batches[0][0]) <= _MAX_BYTES:
            batch, more = self._batches.popleft()
            size += len(batch)
            parts.append(batch)
            choices += more
        return len(parts), b"".join(parts), choices

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
            log.warning("the log had lost its end", request_id=choice.request.request_id)
            self.submit(choice.again(length), [choice])
        if gaps:  # flushes wait until these records are written again
            self._waiters = [(self._num_submitted, done) for _, done in self._waiters]

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for goal, done in waiters:
            if self._num_written < goal:
                self._waiters.append((goal, done))
            elif not done.done():
                done.set_result(None)
