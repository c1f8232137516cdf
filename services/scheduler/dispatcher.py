"""Takes requests from the queue, gives them to decoders, and writes what they generate to the log."""

import asyncio
import contextlib
import time
from collections.abc import Sequence as Items

import structlog

from services.scheduler.core.plan import StepPlan, StepProgress
from services.scheduler.core.policy import Policy
from services.scheduler.core.preemption import PreemptionMode
from services.scheduler.core.router import Router
from services.scheduler.decoder_link import DecoderLink
from services.scheduler.encoders import Encoders
from services.scheduler.ledger import Ledger
from services.scheduler.log_writer import LogWriter
from services.scheduler.request import Request
from shared import tasks
from shared.errors import ServingError, Superseded, Unavailable
from shared.media_store import MediaStore
from shared.queue import ControlChannel, Queue, TakenRequest
from shared.registry import Directory, Member
from shared.text import TokenBytes
from tessera.decoder.v1 import decoder_pb2
from tessera.scheduler.v1.scheduler_pb2 import GetLoadResponse

log = structlog.get_logger(__name__)

_SWEEP_S = 1.0
_RENEW_MEDIA_S = 300.0  # raw media expire after 15 minutes
_RETRY_LEASE_S = 0.2
_SERVED_S = 1.0  # a link that lasted so long had come about
_READY_TO_START = 16  # requests beyond those running that are taken at a time; the rest stay in the queue for others
_NO_LIMIT = 1 << 40


class Dispatcher:
    """Everything between the queue and the decoders. One event loop, no locks: each callback leaves it consistent."""

    def __init__(
        self,
        queue: Queue,
        control: ControlChannel,
        decoders: Directory,
        encoders: Encoders,
        media_store: MediaStore,
        table: TokenBytes,
        scheduler_id: str,
        *,
        lead_s: float,
        encoder_budget: int | None,
        policy: Policy,
        preemption_mode: PreemptionMode,
    ) -> None:
        self._queue = queue
        self._control = control
        self._decoders = decoders
        self._encoders = encoders
        self._media_store = media_store
        self._table = table
        self._scheduler_id = scheduler_id
        self._lead_s = lead_s
        self._encoder_budget = encoder_budget
        self._policy = policy
        self._preemption_mode = preemption_mode
        self._links: dict[str, DecoderLink] = {}
        self._router: Router[DecoderLink] = Router()
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self._taking = True
        self._more = False  # the last look at the queue did not see its end
        self._tokens = 0  # committed at the last measurement
        self._measured_at = 0.0
        self._model: tuple[bytes, int] | None = (
            None  # fingerprint and block size that all decoders share
        )
        self._log = LogWriter(
            queue,
            scheduler_id,
            on_refused=lambda request_id: self._ledger.on_refused(request_id),
            on_cancel=lambda request_id: self._ledger.on_cancel(request_id),
        )
        self._ledger = Ledger(self._log, self._wake.set)

    async def run(self) -> None:
        """Works until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._log.run())
            group.create_task(self._follow_decoders())
            group.create_task(self._follow_control())
            group.create_task(self._take())
            group.create_task(self._sweep())
            group.create_task(self._renew_media())

    async def drain(self, timeout_s: float) -> None:
        """Takes nothing more, finishes the steps under way, logs them, and gives the rest back to the queue."""
        self._taking = False
        links = list(self._links.values())
        await asyncio.gather(*(link.finish_steps(timeout_s) for link in links))
        await tasks.end(*self._keepers.values())
        with contextlib.suppress(TimeoutError, Unavailable):
            async with asyncio.timeout(timeout_s):
                await self._log.flush()
                if requests := self._ledger.request_ids:
                    await self._queue.give_back(self._scheduler_id, requests)
                for link in links:
                    await self._queue.free_decoder(link.member.instance_id, self._scheduler_id)
                await self._queue.leave(self._scheduler_id)

    def load(self) -> GetLoadResponse:
        """What this scheduler holds."""
        return GetLoadResponse(
            scheduler_id=self._scheduler_id, decoders=[link.load() for link in self._links.values()]
        )

    def tokens_per_s(self) -> float | None:
        """Tokens committed a second since the last call, or None while idle or too soon to say."""
        now = asyncio.get_running_loop().time()
        elapsed = now - self._measured_at
        tokens = self._ledger.num_tokens - self._tokens
        if elapsed < 1.0 or not tokens:
            return None
        rate = tokens / elapsed if self._measured_at else None
        self._tokens, self._measured_at = self._ledger.num_tokens, now
        return rate

    # Requests

    async def _take(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SWEEP_S):
                    await self._wake.wait()
            self._wake.clear()
            room = self._room()
            if not self._taking:
                continue
            if room <= 0:
                self._more = True
                continue
            try:
                taken = await self._queue.take(
                    self._scheduler_id, max_requests=room, max_tokens=_NO_LIMIT
                )
            except Unavailable as error:
                log.warning("queue is away", error=error.message)
                continue
            self._more = len(taken or ()) == room
            if taken:
                self._start(taken)
                self._wake.set()

    def _room(self) -> int:
        room = 0
        for link in self._links.values():
            if not link.draining:
                free_slots = link.core.capacity.max_slots - link.core.num_sequences
                room += max(0, min(free_slots, _READY_TO_START - link.core.num_ready_to_start))
        return room

    def _start(self, taken: Items[TakenRequest]) -> None:
        """Gives requests to decoders. One that cannot be read ends with an error: it must not take others along."""
        touched = []
        for one in taken:
            try:
                request = Request(one, self._table)
                first = request.sequences[0]
            except (ValueError, IndexError) as error:
                log.warning("bad request", request=one.spec.request_id, error=str(error))
                self._ledger.refuse(one, str(error))
                continue
            link = self._router.choose(first)
            self._ledger.accept(link, request)
            touched.append(link)
        for link in dict.fromkeys(touched):
            link.pump()

    def _on_step(
        self,
        progress: StepProgress,
        plan: StepPlan | None,
        result: decoder_pb2.StepResult | None,
    ) -> None:
        self._ledger.on_step(progress, plan, result)
        if (
            self._more and self._room() > 0
        ):  # the step has let some of those in that were taken before
            self._wake.set()

    async def _follow_control(self) -> None:
        while True:
            self._wake.set()  # work may have come while nobody listened
            try:
                async for cancelled in self._control.messages():
                    if cancelled is None:
                        self._wake.set()
                    else:
                        self._ledger.on_cancel(cancelled)
            except Unavailable as error:
                log.warning("control channel is away", error=error.message)
                await asyncio.sleep(_RETRY_LEASE_S)

    async def _sweep(self) -> None:
        """Once a second, looks for cancels of requests that log nothing and so would not hear of them."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            waiting = {s.request_id for link in self._links.values() for s in link.core.waiting}
            with contextlib.suppress(Unavailable):
                silent = {*waiting, *self._ledger.silent_request_ids}
                for request_id in await self._queue.forsaken(list(silent)):
                    self._ledger.on_cancel(request_id)
                await self._queue.sweep()

    async def _renew_media(self) -> None:
        """Keeps the raw media of live requests: whoever loses pixels or embeddings begins there."""
        while True:
            await asyncio.sleep(_RENEW_MEDIA_S)
            digests = {
                item.source_digest
                for link in self._links.values()
                for sequence in link.core.sequences()
                for item in sequence.payload.request.spec.media
            }
            with contextlib.suppress(Unavailable):
                await self._media_store.renew(digests)

    # Decoders

    async def _follow_decoders(self) -> None:
        while True:
            for member in self._decoders.members:
                if member.instance_id not in self._keepers:
                    keeper = asyncio.create_task(self._keep(member))
                    self._keepers[member.instance_id] = keeper
            await self._decoders.changed()

    async def _keep(self, member: Member) -> None:
        """Keeps a link to a decoder for as long as it is in the registry."""
        said = ""
        try:
            while self._taking and member in self._decoders.members:
                began = time.monotonic()
                try:
                    lease = await self._queue.lease_decoder(member.instance_id, self._scheduler_id)
                    if lease:
                        await self._serve(member, lease)
                except Superseded as error:
                    log.warning("decoder lost", decoder=member.instance_id, error=error.message)
                except ServingError as error:
                    # Until its place in the registry ends, a dead one is tried five times a second: that is said once.
                    if error.message != said or time.monotonic() - began > _SERVED_S:
                        log.warning(
                            "decoder failed", decoder=member.instance_id, error=error.message
                        )
                    said = error.message
                await asyncio.sleep(_RETRY_LEASE_S)
        finally:
            self._keepers.pop(member.instance_id, None)

    async def _serve(self, member: Member, lease: int) -> None:
        link = DecoderLink(
            member,
            lease,
            self._scheduler_id,
            self._encoders,
            lead_s=self._lead_s,
            encoder_budget=self._encoder_budget,
            policy=self._policy,
            preemption_mode=self._preemption_mode,
            on_step=self._on_step,
        )
        try:
            await link.open()
            self._check_model(link)
            log.info(
                "decoder bound",
                decoder=member.instance_id,
                host=link.hello.host,
                blocks=link.hello.num_blocks,
                max_model_len=link.hello.max_model_len,
                kept_blocks=len(link.hello.sealed_blocks) // 4,
            )
            self._links[member.instance_id] = link
            self._router.add(link)
            self._wake.set()
            await link.run()
        finally:
            self._links.pop(member.instance_id, None)
            self._router.remove(link)
            await asyncio.shield(self._abandon(link))

    async def _abandon(self, link: DecoderLink) -> None:
        """What a lost decoder ran goes back to the head of the queue, with everything that it generated logged."""
        await link.close()
        orphans = self._ledger.of(link)
        if not orphans or not self._taking:
            return
        await self._log.flush()  # a late append would meet the request under its next owner
        self._ledger.forget(orphans)
        log.warning("giving back", requests=len(orphans), decoder=link.member.instance_id)
        await self._queue.give_back(self._scheduler_id, orphans)

    def _check_model(self, link: DecoderLink) -> None:
        found = (link.hello.model_fingerprint, link.hello.block_size)
        if self._model is None or not self._links:
            self._model = found
        if found != self._model:
            raise Unavailable(
                "DECODERS_DIFFER",
                "this decoder has another model, dtype or block size than those in service",
            )
