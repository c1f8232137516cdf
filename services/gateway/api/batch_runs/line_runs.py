"""The lines of a batch that are under way: each is an ordinary request of the class `batch`."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Sequence

from services.gateway.api.batch_forms import BatchForm, LineName, LineRequest
from services.gateway.api.batch_runs.lines import RawLine, custom_id_of, read_line
from services.gateway.api.parts import Parts
from services.gateway.http.inner_calls import InnerCall, InnerReply
from shared.errors import NotFound, ServingError, Unavailable
from shared.net import tasks
from shared.net.backoff import Backoff
from shared.queue.stores.batch_store import COMPLETED, FAILED, StoredBatch

# Until a successor has found the batch, its requests go on.
_KEEP_S = b"120"
# Statuses that the same request need not get later: a full queue, a service that is away.
_LATER = frozenset({429, 503})
# Reasons as passing: the line was not begun within a time that is meant for those who wait for an answer.
_NOT_BEGUN = frozenset({"QUEUE_TIMEOUT"})
# What was computed was lost, or took too long on the way there: it may go well next time, and is not tried for ever.
_AGAIN = frozenset(
    {
        "FIRST_TOKEN_TIMEOUT",
        "GRAMMAR_TIMEOUT",
        "MODEL_CHANGED",
        "PREPARE_TIMEOUT",
        "STREAM_DIVERGED",
    }
)
_MOST_AGAIN = 5
_PAUSES = Backoff(first_s=0.5, longest_s=15.0)
_ROOM_YET_S = 1.0


class LineRuns:
    """Sends lines, and keeps their results."""

    def __init__(
        self,
        parts: Parts,
        batch: StoredBatch,
        form: BatchForm,
        places: asyncio.Semaphore,
        has_room: Callable[[], bool],
    ) -> None:
        """`places` are for lines under way, of all batches; `has_room`: whether results may become more."""
        self._parts = parts
        self._batch = batch
        self._form = form
        self._places = places
        self._has_room = has_room
        self._calls: dict[int, InnerCall] = {}

    async def answer(self, lines: AsyncIterator[RawLine], done: Collection[int]) -> None:
        """Answers all lines but those of the numbers `done`."""
        running: set[asyncio.Task[None]] = set()
        try:
            async for raw in lines:
                if raw.number in done:
                    continue
                while not self._has_room():
                    await asyncio.sleep(_ROOM_YET_S)
                await self._places.acquire()
                task = asyncio.create_task(self._answer_one(raw))
                # Not in the task: one that is cancelled before it begins does nothing.
                task.add_done_callback(lambda _: self._places.release())
                running.add(task)
                for ended in [one for one in running if one.done()]:
                    running.remove(ended)
                    ended.result()
            await asyncio.gather(*running)
        finally:
            await tasks.end(*running)

    def accepted(self) -> list[str]:
        """The ids of the requests that are under way."""
        return [call.accepted for call in self._calls.values() if call.accepted]

    async def end_requests(self, request_ids: Sequence[str]) -> None:
        """Ends requests that nobody waits for any more."""
        for request_id in request_ids:
            with contextlib.suppress(NotFound):
                await self._parts.resumption.cancel(request_id, self._batch.tenant)

    async def _answer_one(self, raw: RawLine) -> None:
        batch = self._batch
        most_bytes = self._parts.body_limits.most_bytes
        try:
            try:
                asked = await read_line(raw, self._form, batch, most_bytes)
                name = LineName(batch.id, raw.number, asked.custom_id)
                reply = await self._reply(raw.number, asked)
                del asked
                kind = COMPLETED if reply.status < 400 else FAILED
                result = self._form.answered(name, reply)
            except ServingError as error:
                kind = FAILED
                name = LineName(batch.id, raw.number, await custom_id_of(raw))
                result = self._form.unanswered(name, error)
            await self._keep(raw.number, kind, result)
        finally:
            self._calls.pop(raw.number, None)

    async def _reply(self, number: int, asked: LineRequest) -> InnerReply:
        """The reply to a line. It is sent again while the queue is full or a service is away, and a few times where its
        answer was lost."""
        batch, failures, losses = self._batch, 0, 0
        headers = [
            (b"idempotency-key", f"batch/{batch.id}/{number}".encode()),
            (b"x-tessera-priority", b"batch"),
            (b"x-tessera-resume", _KEEP_S),
        ]
        while True:
            call = self._parts.inner_calls.post(batch.endpoint, headers, asked.body, batch.tenant)
            self._calls[number] = call
            reply = await call.answer()
            if reply.reason in _AGAIN:
                losses += 1
            if not _may_come(reply, losses):
                return reply
            failures += 1
            await asyncio.sleep(_PAUSES.pause_s(failures))

    async def _keep(self, number: int, kind: str, result: bytes) -> None:
        """Waits where Redis is away: the result would have to be read again."""
        failures = 0
        while True:
            try:
                if await self._parts.batches.keep_result(self._batch.id, number, kind, result):
                    self._parts.metrics.batches.line(kind)
                return
            except Unavailable:
                failures += 1
                await asyncio.sleep(_PAUSES.pause_s(failures))


def _may_come(reply: InnerReply, losses: int) -> bool:
    """Whether there may be another reply to the same line; `losses`: how often its answer was lost."""
    if reply.status in _LATER or reply.reason in _NOT_BEGUN:
        return True
    return reply.reason in _AGAIN and losses <= _MOST_AGAIN
