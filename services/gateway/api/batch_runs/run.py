"""One batch from its first line to its files, by the gateway that leads it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgspec
import structlog

from services.gateway.api.batch_forms import LineName
from services.gateway.api.batch_runs.checking import check_lines
from services.gateway.api.batch_runs.line_runs import LineRuns
from services.gateway.api.batch_runs.lines import RawLine, custom_id_of, raw_lines
from services.gateway.api.batch_runs.outputs import Outputs, lost
from services.gateway.api.batch_runs.problems import Problem, Problems, problem_of
from services.gateway.api.parts import Parts
from shared.errors import InvalidRequest, NotFound
from shared.net import tasks
from shared.queue.stores.batch_store import UNSENT, StoredBatch
from shared.queue.stores.file_store import INNER_KIND, StoredFile

log = structlog.get_logger(__name__)

_EXPIRED, _CANCELLED, _COMPLETED = "expired", "cancelled", "completed"


class BatchRun:
    """Leads one batch. Whatever it was interrupted in, it goes on from what Redis has."""

    def __init__(
        self,
        parts: Parts,
        batch: StoredBatch,
        gateway: str,
        places: asyncio.Semaphore,
        has_room: Callable[[], bool],
    ) -> None:
        """`places` are for lines under way, of all batches; `has_room`: whether results may become more."""
        self._parts = parts
        self._batch = batch
        self._gateway = gateway
        self._form = parts.batch_forms.of(batch.id)
        self._stopping = asyncio.Event()
        self._lines_run = LineRuns(parts, batch, self._form, places, has_room)
        if batch.status == "cancelling":
            self.cancel()

    def cancel(self) -> None:
        """Ends what is under way, and refuses the rest."""
        self._stopping.set()

    async def run(self) -> None:
        """To its end. Raises Unavailable where Redis is away or another gateway leads it."""
        batch = self._batch
        try:
            if not batch.outcome:
                outcome = await self._answer()
                if not outcome:
                    return
                await self._note("finalizing", outcome=outcome)
            else:
                outcome = batch.outcome
        except (InvalidRequest, NotFound) as error:
            await self._fail([problem_of(error)])
            return
        current = await self._current()
        await Outputs(self._parts.batches, self._parts.files, current, self._gateway).write()
        await self._end(outcome)
        log.info("a batch has ended", batch=batch.id, status=outcome, lines=current.total)

    async def fail(self, message: str) -> None:
        """Ends it where it cannot be gone on with."""
        await self._fail([Problem(code="internal", message=message)])

    async def _answer(self) -> str:
        """Answers all lines, or gives those that are left a reason. Returns how the batch ends; empty where it has."""
        file = await self._parts.files.find(self._batch.input, self._batch.tenant)
        if file is None:
            raise NotFound("FILE_LOST", f"{self._batch.input} is gone", field="input_file_id")
        total = self._batch.total
        if total is None:
            checked = await check_lines(
                self._parts.batches, self._batch, self._form, self._lines(file), self._most_bytes
            )
            if not checked.is_served:
                await self._fail(checked.problems, checked.total)
                return ""
            total = checked.total
            problems = msgspec.json.encode(Problems(data=checked.problems))
            await self._note(
                "in_progress", total=total, **({"problems": problems} if checked.problems else {})
            )
        elif self._batch.status == "validating":  # they were counted when it was made
            await self._note("in_progress")
        outcome = await self._until_stopped(self._answer_lines(file, total))
        if outcome != _COMPLETED:
            await self._refuse_rest(file, outcome)
        return outcome

    async def _answer_lines(self, file: StoredFile, total: int) -> None:
        store, batch_id = self._parts.batches, self._batch.id
        while len(done := await store.lines_with_results(batch_id)) < total:
            current = await self._current()
            if current.outcome:
                raise lost(batch_id)
            await self._lines_run.answer(self._lines(file), done)

    async def _until_stopped(self, work: Coroutine[Any, Any, None]) -> str:
        """Does it until the batch is cancelled or expires. Returns how it ends."""
        working = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self._stopping.wait())
        requests: list[str] = []
        try:
            left_ms = self._batch.expires_ms - await self._parts.batches.now_ms()
            await asyncio.wait(
                [working, stopping],
                timeout=max(0, left_ms) / 1000,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if working.done() and not self._stopping.is_set():
                working.result()
                return _COMPLETED
            requests = self._lines_run.accepted()
        finally:
            await tasks.end(working, stopping)
        await self._lines_run.end_requests(requests)
        return _CANCELLED if self._stopping.is_set() else _EXPIRED

    async def _refuse_rest(self, file: StoredFile, outcome: str) -> None:
        store, batch_id = self._parts.batches, self._batch.id
        done = await store.lines_with_results(batch_id)
        async for raw in self._lines(file):
            if raw.number not in done:
                name = LineName(batch_id, raw.number, await custom_id_of(raw))
                result = self._form.left(name, outcome)
                await store.keep_result(batch_id, raw.number, UNSENT, result)

    async def _fail(self, problems: list[Problem], total: int = 0) -> None:
        content = msgspec.json.encode(Problems(data=problems))
        known = self._batch.total
        await self._end("failed", total=total if known is None else known, problems=content)
        log.info("a batch has failed", batch=self._batch.id, problems=len(problems))

    async def _end(self, status: str, **fields: str | bytes | int) -> None:
        """Its last status. A file that it had for itself makes room for others."""
        await self._note(status, **fields)
        if self._batch.input.startswith(INNER_KIND):
            await self._parts.files.forget(self._batch.input, self._batch.tenant)

    async def _note(self, status: str, **fields: str | bytes | int) -> None:
        if not await self._parts.batches.note(self._batch.id, self._gateway, status, **fields):
            raise lost(self._batch.id)
        self._parts.metrics.batches.reached(status)

    async def _current(self) -> StoredBatch:
        found = await self._parts.batches.find(self._batch.id, self._batch.tenant)
        if found is None:
            raise lost(self._batch.id)
        return found

    def _lines(self, file: StoredFile) -> AsyncIterator[RawLine]:
        parts = self._parts
        return raw_lines(parts.files, file.id, file.pieces, self._most_bytes, parts.slices)

    @property
    def _most_bytes(self) -> int:
        return self._parts.body_limits.most_bytes
