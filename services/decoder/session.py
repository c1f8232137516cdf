"""One binding to one scheduler: its plans go to the compute thread, results come back."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager

import structlog

from services.decoder.measures import DecoderMeasures
from services.decoder.worker.executor import Executor
from services.decoder.worker.launched_step import LaunchedStep
from services.decoder.worker.plans.plan import Plan
from services.decoder.worker.worker import Worker
from shared.environment import monotonic
from shared.errors import Internal, InvalidRequest, Precondition, ServingError, Unavailable
from tessera.decoder.v1.decoder_pb2 import (
    Heartbeat,
    StepPlan,
    StepResult,
    StepsRequest,
    StepsResponse,
)

log = structlog.get_logger(__name__)

PLANS_IN_FLIGHT = 2
_HEARTBEAT_S = 0.5
_SILENCE_S = 2.0


class Session:
    """Lives as long as its stream. Everything but `_run`, `_collect` and `_report_soon` is called on the event loop."""

    def __init__(
        self,
        lease: int,
        worker: Worker,
        executor: Executor,
        measures: DecoderMeasures,
        collector: Executor | None = None,
    ) -> None:
        """collector: where steps are collected while the next one is launched; without one a step is launched and
        collected in one go."""
        self.lease = lease
        self.draining = False
        self._worker = worker
        self._executor = executor
        self._measures = measures
        self._collector = collector
        self._loop = asyncio.get_running_loop()
        self._outbox: asyncio.Queue[StepsResponse | ServingError] = asyncio.Queue()
        self._ended = False  # read by the compute thread: plans that wait are not run any more
        self._last_step = 0
        self._unanswered: deque[Plan] = deque()
        self._heard = self._loop.time()
        worker.embeddings.listen(self._report)
        worker.adapters.listen(self._report_soon)

    def end(self, error: ServingError) -> None:
        """Ends the stream with an error; plans that have not begun are not run."""
        if not self._ended:
            self._ended = True
            self._outbox.put_nowait(error)

    def close(self) -> None:
        """The stream is gone."""
        self._ended = True

    async def responses(self) -> AsyncGenerator[StepsResponse, None]:
        """Results and heartbeats. Raises what the session ended with."""
        ticker = asyncio.create_task(self._tick())
        try:
            while True:
                item = await self._outbox.get()
                if isinstance(item, ServingError):
                    raise item
                yield item
        finally:
            ticker.cancel()

    async def read(self, requests: AsyncIterator[StepsRequest]) -> None:
        """Takes in what the scheduler sends, until it sends no more."""
        try:
            async for request in requests:
                self._heard = self._loop.time()
                kind = request.WhichOneof("message")
                if kind == "plan":
                    self._accept(request.plan)
                elif kind != "heartbeat":
                    raise InvalidRequest(
                        "UNEXPECTED_MESSAGE", f"{kind or 'an empty message'} in an open stream"
                    )
            self.end(Unavailable("SCHEDULER_GONE", "the scheduler closed the stream"))
        except ServingError as error:
            self.end(error)
        except Exception as error:  # the transport's own, which differ by how the peer went
            self.end(Unavailable("SCHEDULER_GONE", f"the stream broke: {error!r}"))

    def announce_draining(self) -> None:
        """Tells the scheduler at once that this decoder wants to be emptied."""
        self.draining = True
        self._beat()

    def _accept(self, message: StepPlan) -> None:
        if message.lease != self.lease:
            raise Precondition(
                "STALE_LEASE", f"plan of lease {message.lease} in a stream of lease {self.lease}"
            )
        if message.step != self._last_step + 1:
            raise InvalidRequest(
                "INVALID_PLAN", f"step plan: step {message.step} follows {self._last_step}"
            )
        if len(self._unanswered) >= PLANS_IN_FLIGHT:
            raise InvalidRequest(
                "INVALID_PLAN", f"step plan: more than {PLANS_IN_FLIGHT} are unanswered"
            )
        self._last_step += 1
        plan = self._worker.accept(message)
        self._unanswered.append(plan)
        arrived = monotonic()
        self._executor.submit(lambda: self._run(plan, arrived))

    def _run(self, plan: Plan, arrived: float) -> None:
        """On the compute thread."""
        if self._ended:
            return
        queued_us = int((monotonic() - arrived) * 1e6)
        if self._collector is None:
            with self._failing(plan):
                self._worker.step(plan, self._deliver, queued_us)
            return
        with self._failing(plan):
            step = self._worker.launch(plan, queued_us)
            self._collector.submit(lambda: self._collect(step))

    def _collect(self, step: LaunchedStep) -> None:
        """On the thread that collects; also after the end, because histories are completed here."""
        with self._failing(step.plan):
            self._worker.collect(step, self._deliver)

    @contextmanager
    def _failing(self, plan: Plan) -> Iterator[None]:
        """Ends the stream with what a step raises."""
        try:
            yield
        except ServingError as error:
            self._fail(error)
        except Exception as error:
            known = self._worker.slots.names
            who = [known[slot] for slot in plan.row_slot.tolist() if slot in known]
            log.exception("a step failed", step=plan.step, requests=who)
            self._fail(Internal("STEP_FAILED", f"step {plan.step} failed: {error}"))

    def _deliver(self, result: StepResult) -> None:
        self._loop.call_soon_threadsafe(self._answer, result)

    def _fail(self, error: ServingError) -> None:
        self._loop.call_soon_threadsafe(self._step_failed, error)

    def _step_failed(self, error: ServingError) -> None:
        self._measures.failed_steps += 1
        self.end(error)

    def _answer(self, result: StepResult) -> None:
        plan = self._unanswered.popleft()
        self._outbox.put_nowait(StepsResponse(result=result))
        self._measures.answered(plan, result)

    def _report(self) -> None:
        """Says at once what became of artifacts and adapters: the scheduler may have no step to run until it hears."""
        if self._ended:
            return
        ready, lost = self._worker.embeddings.report()
        adapters = self._worker.adapters.report()
        if ready or lost or adapters:
            news = StepResult(
                lease=self.lease, artifacts_ready=ready, artifacts_lost=lost, adapters=adapters
            )
            self._outbox.put_nowait(StepsResponse(result=news))

    def _report_soon(self) -> None:
        """On any thread."""
        self._loop.call_soon_threadsafe(self._report)

    def _beat(self) -> None:
        self._outbox.put_nowait(StepsResponse(heartbeat=Heartbeat(draining=self.draining)))

    async def _tick(self) -> None:
        """Sends heartbeats from the event loop, so that a long step does not look like a dead decoder, and ends the
        stream when the scheduler is silent."""
        while True:
            before = self._loop.time()
            await asyncio.sleep(_HEARTBEAT_S)
            now = self._loop.time()
            if now - before > _SILENCE_S / 2:
                self._heard = now  # this process was suspended: messages that arrived meanwhile are still unread
            self._beat()
            if now - self._heard > _SILENCE_S:
                self.end(
                    Unavailable("SCHEDULER_SILENT", f"nothing was heard for {_SILENCE_S:.0f} s")
                )
