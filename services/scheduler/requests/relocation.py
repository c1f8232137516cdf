"""Moves requests off decoders that are to be emptied, and back to the queue where no decoder can take them."""

import asyncio
from collections.abc import Collection

import structlog

from services.scheduler.core.sequence import SequenceStatus
from services.scheduler.decoders.fleet import Fleet
from services.scheduler.decoders.link import DecoderLink
from services.scheduler.output.log_writer import LogWriter
from services.scheduler.output.request import Request
from services.scheduler.requests.output_tracker import OutputTracker
from services.scheduler.requests.recovery import Recovery
from shared.errors import Unavailable
from shared.queue import Queue
from shared.telemetry.outage import Outage

log = structlog.get_logger(__name__)

_LOOK_S = 0.05
_RETRY_S = 0.2


class Relocation:
    """Empties decoders that are leaving. What moved requests must compute again is at most one step's budget at a time,
    so that requests which decode on the target are hardly delayed.
    """

    def __init__(self, tracker: OutputTracker, fleet: Fleet, returns: "Returns") -> None:
        self._tracker = tracker
        self._fleet = fleet
        self._returns = returns
        self._moved: list[Request] = []  # and not yet as far as they were

    async def run(self) -> None:
        """Works until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            links = list(self._fleet.links.values())
            leaving = [link for link in links if link.draining]
            if leaving:
                self._step(leaving, [link for link in links if not link.draining])

    def _step(self, leaving: list[DecoderLink], others: list[DecoderLink]) -> None:
        touched: dict[DecoderLink, None] = {}
        self._moved = [request for request in self._moved if _is_catching_up(request)]
        for link in leaving:
            for request in self._tracker.of(link):
                fit = _preferred([o for o in others if _can_run(o, request)], request)
                if not _has_slot(request):
                    self._send_on(request, fit, touched)
                elif self._may_move(request, fit):
                    self._moved.append(self._move(request, touched))
            state = link.core.state
            if not state.num_sequences and not state.in_flight:
                link.finish("DECODER_EMPTIED", "it has nothing more to do")
        for link in touched:
            link.pump()
        for link in leaving:
            link.pump()  # drops what has moved

    def _send_on(
        self, request: Request, others: list[DecoderLink], touched: dict[DecoderLink, None]
    ) -> None:
        """A request without a slot: nothing of it must be computed again."""
        if others:
            self._move(request, touched)
        else:
            self._returns.put([request.request_id])

    def _may_move(self, request: Request, others: Collection[DecoderLink]) -> bool:
        """Ranked outputs and beams would begin at the prompt again: they run to their end."""
        if request.collects:
            return False
        cost = _tokens(request)
        recomputing = sum(map(_tokens, self._moved))
        return any(
            (not recomputing or recomputing + cost <= link.core.capacity.max_batched_tokens)
            and _has_room(link, request, cost)
            for link in others
        )

    def _move(self, request: Request, touched: dict[DecoderLink, None]) -> Request:
        router = self._fleet.router(request.content)
        assert router is not None  # the caller has found a decoder that fits
        target = router.choose(request.sequences[0], request.decoder_numerics)
        touched[target] = None
        return self._tracker.move(request.request_id, target)


def _can_run(link: DecoderLink, request: Request) -> bool:
    """Whether it can go on there: no answer goes on with other weights."""
    return link.content == request.content and link.core.capacity.holds(request.sequences[0])


def _preferred(links: list[DecoderLink], request: Request) -> list[DecoderLink]:
    """Those of the numerics that it was begun in; all where there are none, or nothing is begun."""
    begun_in = request.decoder_numerics
    return [link for link in links if link.numerics == begun_in] or links


def _has_slot(request: Request) -> bool:
    return any(s.slot >= 0 for s in request.sequences)


def _tokens(request: Request) -> int:
    """What must be computed again; choices without output share their prompt."""
    fresh = request.fresh[:1]
    return sum(len(s.tokens) for s in request.sequences if s not in request.fresh) + sum(
        len(s.tokens) for s in fresh
    )


def _has_room(link: DecoderLink, request: Request, tokens: int) -> bool:
    state = link.core.state
    if state.num_ready_to_start or len(state.slots.free) < len(request.sequences):
        return False
    return state.blocks.num_free * state.capacity.block_size > 2 * tokens


def _is_catching_up(request: Request) -> bool:
    return any(
        s.status is not SequenceStatus.RUNNING or s.num_tokens - s.num_computed_tokens > 1
        for s in request.sequences
        if not s.ended
    )


class Returns:
    """Puts requests back at the head of the queue, with all that they have generated in the log before."""

    def __init__(
        self,
        queue: Queue,
        scheduler_id: str,
        tracker: OutputTracker,
        writer: LogWriter,
        recovery: Recovery,
    ) -> None:
        self._queue = queue
        self._recovery = recovery
        self._scheduler_id = scheduler_id
        self._tracker = tracker
        self._writer = writer
        self._waiting: dict[str, None] = {}
        self._work = asyncio.Event()

    def put(self, request_ids: list[str]) -> None:
        """These are to go back, if they have not ended. They stay in the tracker until the queue has them."""
        present = [rid for rid in request_ids if self._tracker.has(rid)]
        if present:
            self._tracker.unassign(present, "it goes back to the queue")
            self._waiting.update(dict.fromkeys(present))
            self._work.set()

    async def run(self) -> None:
        """Works until cancelled."""
        outage = Outage(log, "requests cannot be given back yet, trying again")
        while True:
            await self._work.wait()
            self._work.clear()
            while self._waiting:
                waiting, self._waiting = self._waiting, {}
                try:
                    await self.give_back([r for r in self._tracker.unassigned if r in waiting])
                    outage.over()
                except Unavailable as error:
                    outage.note(error.message)
                    self._waiting = {**waiting, **self._waiting}
                    await asyncio.sleep(_RETRY_S)

    async def give_back(self, request_ids: list[str]) -> None:
        """Gives unassigned requests back. Raises Unavailable."""
        await self._writer.flush()  # a late append would meet the request under its next owner
        restarts = self._queue.restarts
        found = [r for rid in request_ids if (r := self._tracker.find(rid)) is not None]
        lost_decoders = {request.request_id: request.lost_decoders for request in found}
        await self._queue.give_back(self._scheduler_id, request_ids, lost_decoders)
        if self._recovery.is_settled and restarts == self._queue.restarts:
            self._tracker.forget(request_ids)
            log.warning("gave requests back to the queue", requests=len(request_ids))
        else:  # Redis may not have known that they were ours
            await self._recovery.settled()
            await self.give_back(request_ids)
