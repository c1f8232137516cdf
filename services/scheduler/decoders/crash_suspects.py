"""Requests that are suspected of crashing decoders."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import structlog

from services.scheduler.core.sequence import INTERNAL, Ending, EndReason, Error
from services.scheduler.output.request import SUSPECT, Request
from shared.errors import Unavailable
from shared.net import tasks
from shared.net.supervise import Background
from shared.queue import Queue

log = structlog.get_logger(__name__)

_MAX_LOST_DECODERS = 3
_HELD_S = 0.2  # requests that are not suspected yet: whether a process on a live machine has ended shows sooner

_Finding = Callable[[], Coroutine[Any, Any, bool]]

POISONED = Ending(
    EndReason.ERROR,
    error=Error(
        "POISONED",
        f"{_MAX_LOST_DECODERS} decoders were lost while they ran this request, the last one while it ran nothing else;"
        " it is not run again: change the request, and report it to whoever runs this service",
        INTERNAL,
    ),
)


class CrashSuspects:
    """Counts the decoders whose process ended, or that failed a whole step, while they computed something of a request
    (`Request.lost_decoders`). A binding that is lost while the process lives on counts nothing: a scheduler that stood
    still, a lease that another one has, a broken stream or network.

    After the first nothing changes. After two the request is isolated for a while (`core.sequence.Isolation`), so that
    requests that were in the same step are not suspected with it; once it has got past that place it runs with others
    again. A request with which a third decoder is lost while it runs alone is ended.
    """

    def __init__(
        self,
        queue: Queue,
        find: Callable[[str], Request | None],
        end: Callable[[str, Ending], None],
        give_back: Callable[[list[str]], None],
    ) -> None:
        """`find(request_id)` gives a request that this scheduler owns, `end(request_id, ending)` ends one,
        `give_back(request_ids)` returns those that no decoder runs to the queue.
        """
        self._queue = queue
        self._find = find
        self._end = end
        self._give_back = give_back
        self._inquiries: dict[object, Background] = {}

    def step_failed(self, requests: Iterable[Request], *, was_alone: bool) -> None:
        """A step with rows of these failed as a whole, with rows of no others where one `was_alone`."""
        self._count([request.request_id for request in requests], was_alone)

    def binding_lost(self, requests: Iterable[Request], died: _Finding, *, was_alone: bool) -> None:
        """A decoder was lost while a step with rows of these was not answered; `died` finds out whether its process has
        ended. The requests are held until that is known: shortly, or for as long as it takes where they are suspected
        already, since each further try may cost another decoder.
        """
        ids = [request.request_id for request in requests]
        # A key, since a task that refers to itself is freed by the garbage collector alone.
        inquiry = object()

        async def inquire() -> None:
            await self._inquire(ids, died, was_alone)
            self._inquiries.pop(inquiry)

        self._inquiries[inquiry] = Background("inquiry about a lost decoder", inquire)

    async def close(self) -> None:
        """Ends all inquiries; what is held stays so."""
        await asyncio.gather(*(inquiry.end() for inquiry in list(self._inquiries.values())))

    async def _inquire(self, held: list[str], died: _Finding, was_alone: bool) -> None:
        finding = asyncio.create_task(died())
        released: list[str] = []
        try:
            await asyncio.wait([finding], timeout=_HELD_S)
            if not finding.done():
                released = [rid for rid in held if not self._is_suspected(rid)]
                held = [rid for rid in held if rid not in released]
                self._give_back(released)
            if await finding:
                self._count([*held, *released], was_alone)
                await self._count_elsewhere(released)
            self._give_back(held)
        finally:
            await tasks.end(finding)

    def _is_suspected(self, request_id: str) -> bool:
        request = self._find(request_id)
        return request is not None and request.lost_decoders >= SUSPECT

    def _count(self, request_ids: list[str], was_alone: bool) -> None:
        for request in filter(None, map(self._find, request_ids)):
            request.lost_decoders += 1
            log.warning(
                "a request was at a lost decoder",
                **request.names,
                lost_decoders=request.lost_decoders,
            )
            if was_alone and request.lost_decoders >= _MAX_LOST_DECODERS:
                log.error(
                    "a request is poisoned and ends",
                    **request.names,
                    lost_decoders=request.lost_decoders,
                )
                self._end(request.request_id, POISONED)

    async def _count_elsewhere(self, request_ids: list[str]) -> None:
        """They have gone back to the queue: their next owner is to know."""
        if not request_ids:
            return
        try:
            await self._queue.blame(request_ids)
        except Unavailable as error:
            log.warning("lost decoders not counted", error=error.message)
