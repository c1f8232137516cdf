"""Takes requests from the queue, gives them to decoders, and writes what they generate to the log."""

import asyncio
import contextlib
from collections.abc import Collection
from collections.abc import Sequence as Items
from functools import partial

import structlog

from services.scheduler.core.plan import StepPlan, StepProgress
from services.scheduler.decoders.adapter_loads import AdapterLoads
from services.scheduler.decoders.crash_suspects import CrashSuspects
from services.scheduler.decoders.fleet import Fleet
from services.scheduler.decoders.link import DecoderLink, LinkEnd, LinkOptions
from services.scheduler.decoders.process_death import has_died
from services.scheduler.decoders.throughput import Throughput
from services.scheduler.encoders import Encoders
from services.scheduler.measures import SchedulerMeasures
from services.scheduler.output.log_writer import LogWriter
from services.scheduler.output.request import Request
from services.scheduler.requests.deadlines import Deadlines
from services.scheduler.requests.intake import Intake
from services.scheduler.requests.output_tracker import KEPT_S, OutputTracker
from services.scheduler.requests.recovery import Recovery
from services.scheduler.requests.relocation import Relocation, Returns
from shared.environment import monotonic
from shared.errors import InvalidRequest, Unavailable
from shared.queue import ControlChannel, Queue, TakenRequest
from shared.queue.registry import Directory, Member
from shared.queue.stores.media_store import MediaStore
from shared.queue.stores.timeline_store import TimelineWriter
from shared.telemetry.outage import Outage
from shared.telemetry.request_names import names
from shared.telemetry.timeline import Timelines
from shared.text.text_fold import TokenBytes
from tessera.decoder.v1 import decoder_pb2
from tessera.scheduler.v1.scheduler_pb2 import GetLoadResponse

log = structlog.get_logger(__name__)

_SWEEP_S = 1.0
_RENEW_MEDIA_S = 300.0  # raw media expire after 15 minutes
_RETRY_S = 0.2


class Dispatcher:
    """Everything between the queue and the decoders. One event loop, no locks: each callback leaves it consistent."""

    def __init__(
        self,
        queue: Queue,
        control: ControlChannel,
        decoders: Directory,
        encoders: Encoders,
        media_store: MediaStore,
        adapters: AdapterLoads,
        table: TokenBytes,
        scheduler_id: str,
        timelines: Timelines,
        timeline_writer: TimelineWriter,
        *,
        link_options: LinkOptions,
        kept_s: float = KEPT_S,
    ) -> None:
        self._queue = queue
        self._no_queue = Outage(log, "nothing can be taken from the queue, trying again")
        self._control = control
        self._encoders = encoders
        self._media_store = media_store
        self._adapters = adapters
        self._table = table
        self._scheduler_id = scheduler_id
        self._timelines = timelines
        self._timeline_writer = timeline_writer
        self._link_options = link_options
        self._wake = asyncio.Event()
        self._taking = True
        self._tokens = 0  # committed at the last measurement
        self._measured_at = 0.0
        self._strays: set[str] = set()  # owned in Redis and unknown here, at the last look
        self._others: Collection[str] = ()  # the other live schedulers
        self._log = LogWriter(
            queue,
            scheduler_id,
            timelines,
            on_refused=lambda request_id: self._tracker.on_refused(request_id),
            on_cancel=lambda request_id: self._tracker.on_cancel(request_id),
            is_settled=lambda: self._recovery.is_settled,
            settled=lambda: self._recovery.settled(),
        )
        self._tracker = OutputTracker(self._log, self._wake.set, timelines, kept_s)
        self._recovery = Recovery(queue, scheduler_id, self._tracker)
        self._deadlines = Deadlines(self._tracker.find, self._tracker.end)
        self._returns = Returns(queue, scheduler_id, self._tracker, self._log, self._recovery)
        self._suspects = CrashSuspects(
            queue, self._tracker.find, self._tracker.end, self._returns.put
        )
        self._decoders = decoders
        self._fleet = Fleet(
            queue,
            decoders,
            scheduler_id,
            open_link=self._open_link,
            on_bound=self._on_bound,
            on_lost=self._on_lost,
        )
        self._relocation = Relocation(self._tracker, self._fleet, self._returns)
        self._intake = Intake(self._fleet.links)
        self._throughput = Throughput(lambda: self.load().decoders)
        self.measures = SchedulerMeasures(self._fleet.links, self._tracker, encoders)

    async def run(self) -> None:
        """Works until cancelled, and then leaves everything as it is."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._recovery.run())
                group.create_task(self._log.run())
                group.create_task(self._timeline_writer.run())
                group.create_task(self._returns.run())
                group.create_task(self._relocation.run())
                group.create_task(self._fleet.run())
                group.create_task(self._adapters.run(self._fleet.links.values()))
                group.create_task(self._follow_control())
                group.create_task(self._take())
                group.create_task(self._sweep())
                group.create_task(self._renew_media())
                group.create_task(self._throughput.run())
        finally:
            self._taking = False
            self._deadlines.close()
            await self._fleet.close()
            await self._suspects.close()
            await self._encoders.close()

    async def drain(self, timeout_s: float) -> None:
        """Takes nothing more, finishes the steps under way, logs them, and gives the rest back to the queue."""
        self._taking = False
        await self._fleet.finish_steps(timeout_s)
        decoders = list(self._fleet.links)
        await self._fleet.close()
        await self._suspects.close()
        with contextlib.suppress(TimeoutError, Unavailable):
            async with asyncio.timeout(timeout_s):
                if requests := self._tracker.request_ids:
                    self._tracker.unassign(requests, "its scheduler stops")
                    await self._returns.give_back(requests)
                await self._log.flush()
                await self._timeline_writer.flush()
                for decoder in decoders:
                    await self._queue.free_decoder(decoder, self._scheduler_id)
                await self._queue.leave(self._scheduler_id)

    def note_others(self, scheduler_ids: Collection[str]) -> None:
        """These other schedulers are alive."""
        self._others = scheduler_ids

    def load(self) -> GetLoadResponse:
        """What this scheduler holds."""
        return GetLoadResponse(
            scheduler_id=self._scheduler_id,
            decoders=[link.load() for link in self._fleet.links.values()],
        )

    def contents(self) -> Collection[str]:
        """Of the decoders that it has: the digests of their weights in hex."""
        return {link.content for link in self._fleet.links.values()}

    def tokens_per_s(self) -> float | None:
        """Tokens committed a second since the last call, or None while idle or too soon to say."""
        now = asyncio.get_running_loop().time()
        elapsed = now - self._measured_at
        tokens = self._tracker.num_tokens - self._tokens
        if elapsed < 1.0 or not tokens:
            return None
        rate = tokens / elapsed if self._measured_at else None
        self._tokens, self._measured_at = self._tracker.num_tokens, now
        return rate

    # Requests

    async def _take(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SWEEP_S):
                    await self._wake.wait()
            self._wake.clear()
            places = self._intake.places()
            if not self._taking or not places:
                continue
            try:
                taken = await self._queue.take(self._scheduler_id, places)
            except Unavailable as error:
                self._no_queue.note(error.message)
                continue
            self._no_queue.over()
            self._intake.note(taken or ())
            if taken:
                self.measures.taken += len(taken)
                lora_ids = [one.spec.lora_id for one in taken]
                await self._adapters.know(lora_ids, self._fleet.links.values())
                self._start(taken)
                self._wake.set()

    def _start(self, taken: Items[TakenRequest]) -> None:
        """Gives requests to decoders. One that cannot be read ends with an error: it must not take others along."""
        touched = []
        for one in taken:
            try:
                numerics = self._encoders.numerics_for(one)
                folder = self._adapters.folder_of(one.spec.lora_id)
                request = Request(one, self._table, numerics, folder)
                first = request.sequences[0]
            except (ValueError, IndexError, InvalidRequest) as error:
                called = names(
                    one.spec.request_id, one.spec.client_request_id, one.spec.traceparent
                )
                log.warning("a request cannot be read", **called, error=str(error))
                self._tracker.refuse(one, str(error))
                continue
            request.taken_at = monotonic()
            self._note_taken(request)
            log.debug("taken", **request.names, attempt=one.attempts)
            late = self._deadlines.watch(request)
            router = self._fleet.router(request.content)
            if late is not None:
                self._tracker.end_untried(request, late)
            elif router is None:  # the last decoder was lost while the answer was on its way
                self._tracker.hold(request)
                self._returns.put([request.request_id])
            else:
                link = router.choose(first, request.decoder_numerics)
                self._tracker.accept(link, request)
                touched.append(link)
        for link in dict.fromkeys(touched):
            link.pump()

    def _note_taken(self, request: Request) -> None:
        rid, (since, taken) = request.request_id, request.waited_us
        if request.attempts == 1:
            self._timelines.span(rid, "queue", since, taken, service="queue", replica="")
        attempt, tokens = request.attempts, request.num_tokens
        self._timelines.span(rid, "take", taken, taken, attempt=attempt, tokens=tokens)

    def _on_step(
        self,
        progress: StepProgress,
        plan: StepPlan | None,
        result: decoder_pb2.StepResult | None,
    ) -> None:
        before = self._tracker.num_tokens
        self._tracker.on_step(progress, plan, result)
        if plan is not None:
            self._throughput.add(plan.num_tokens, self._tracker.num_tokens - before)
        # The step has started some of the requests that were taken before.
        if self._intake.more_wait and self._intake.has_places:
            self._wake.set()

    async def _follow_control(self) -> None:
        outage = Outage(log, "the control channel is lost, connecting again")
        while True:
            self._wake.set()  # work may have come while the channel was away
            try:
                async for cancelled in self._control.messages():
                    outage.over()
                    if cancelled is None:
                        self._wake.set()
                    else:
                        self._tracker.on_cancel(cancelled)
            except Unavailable as error:
                outage.note(error.message)
                await asyncio.sleep(_RETRY_S)

    async def _sweep(self) -> None:
        """Once a second, looks for what no message announces."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            self._tracker.forget_ended()
            if not self._recovery.is_settled:
                continue
            with contextlib.suppress(Unavailable):
                for request_id in await self._queue.abandoned(self._tracker.request_ids):
                    self._tracker.on_cancel(request_id)
                await self._return_strays()
                await self._queue.sweep()
                await self._fleet.share(self._others)

    async def _return_strays(self) -> None:
        """A take whose answer was lost has made this the owner of requests that it does not know: they go back. What is
        seen twice is not just on its way here."""
        owned = await self._queue.owned(self._scheduler_id)
        pending = self._log.pending()
        strays = [r for r in owned if not self._tracker.has(r) and r not in pending]
        lost = [r for r in strays if r in self._strays]
        self._strays = set(strays)
        if lost:
            log.warning("giving requests back whose take was not answered", requests=len(lost))
            await self._queue.give_back(self._scheduler_id, lost)

    async def _renew_media(self) -> None:
        """Keeps the raw media of live requests: whoever loses pixels or embeddings begins there."""
        while True:
            await asyncio.sleep(_RENEW_MEDIA_S)
            digests = dict.fromkeys(
                item.source_digest
                for request in self._tracker.requests
                for item in request.spec.media
            )
            with contextlib.suppress(Unavailable):
                await self._media_store.renew(digests)

    # Decoders

    def _open_link(self, member: Member, lease: int) -> DecoderLink:
        return DecoderLink(
            member,
            lease,
            self._scheduler_id,
            self._encoders,
            options=self._link_options,
            on_step=self._on_step,
            on_returned=self._returns.put,
            on_adapter=self._adapters.note,
            timelines=self._timelines,
        )

    def _on_bound(self, link: DecoderLink) -> None:
        self._adapters.bound(link)
        self._wake.set()

    def _on_lost(self, link: DecoderLink) -> None:
        """What a lost decoder ran goes back to the head of the queue, with everything that it generated logged."""
        if not self._taking:
            return
        self.measures.lost(link)
        requests = self._tracker.of(link)
        lost = f"the decoder was lost ({link.ended.name.lower().replace('_', ' ')})"
        self._tracker.unassign([request.request_id for request in requests], lost)
        in_flight = link.in_flight_requests
        computed = [r for r in requests if r.request_id in in_flight]
        was_alone = len(in_flight) == 1
        if link.ended is LinkEnd.BROKEN and computed:
            died = partial(has_died, link.member, self._decoders, self._scheduler_id)
            self._suspects.binding_lost(computed, died, was_alone=was_alone)
            requests = [r for r in requests if r.request_id not in in_flight]
        elif link.ended is LinkEnd.STEP_FAILED:
            self._suspects.step_failed(computed, was_alone=was_alone)
        self._returns.put([request.request_id for request in requests])
