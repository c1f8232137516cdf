"""Requests that are suspected of crashing decoders."""

from collections.abc import Callable

import structlog

from services.scheduler.core.sequence import INTERNAL, Ending, EndReason, Error
from services.scheduler.output.request import Request

log = structlog.get_logger(__name__)

_MAX_LOST_DECODERS = 3

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
    """Counts the decoders that were lost while they computed something of a request (`Request.lost_decoders`).

    After the first nothing changes. After two the request is isolated for a while (`core.sequence.Isolation`), so that
    requests that were in the same step are not suspected with it; once it has got past that place it runs with others
    again. A request with which a third decoder is lost while it runs alone is ended.
    """

    def __init__(self, end: Callable[[str, Ending], None]) -> None:
        """`end(request_id, ending)` ends a request."""
        self._end = end

    def add_loss(self, requests: list[Request], *, was_alone: bool) -> None:
        """A decoder was lost whose last plans had rows of these, and of no others where it `was_alone`."""
        for request in requests:
            request.lost_decoders += 1
            log.warning("lost with a decoder", **request.names, lost_decoders=request.lost_decoders)
            if was_alone and request.lost_decoders >= _MAX_LOST_DECODERS:
                log.error("poisoned", **request.names, lost_decoders=request.lost_decoders)
                self._end(request.request_id, POISONED)
