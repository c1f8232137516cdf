"""Has the media items encoded that the sequences of one decoder need."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import structlog

from services.scheduler.core.plan import StepProgress
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence import Error, MediaSpan
from services.scheduler.encoders import Encoders, NumericsGone
from shared.environment import monotonic
from shared.errors import Internal, ServingError, status_number
from shared.net import tasks
from shared.telemetry import request_names
from shared.telemetry.timeline import Timelines

if TYPE_CHECKING:
    from services.scheduler.output.request import Request, WantedItem

log = structlog.get_logger(__name__)

_LOST_AGAIN_S = 2.0


class EmbeddingRequests:
    """Calls the encoders for what the core wants, and releases there what the decoder has.

    `on_change(progress)` is called when the core may plan on: with what ended where an item cannot be encoded, else
    with None. `on_lost_again(digest)` is called when an item that was lost repeatedly is to be asked for again;
    `on_returned(request ids)` when the encoders that an item's name is of are gone, and requests need other names. All
    three are methods of the link that has this object; they are held weakly, so that its count of references frees it.
    """

    def __init__(
        self,
        core: Scheduler,
        encoders: Encoders,
        user: str,
        on_change: Callable[[StepProgress | None], None],
        on_lost_again: Callable[[bytes], None],
        on_returned: Callable[[list[str]], None],
        *,
        content: bytes = b"",
        timelines: Timelines,
    ) -> None:
        """`user` is the decoder's name at the encoders, `content` the digest of its weights."""
        self._core = core
        self._encoders = encoders
        self._user = user
        self._content = content
        self._timelines = timelines
        self._on_change = _weakly(on_change)
        self._on_lost_again = _weakly(on_lost_again)
        self._on_returned = _weakly(on_returned)
        self._calls: dict[asyncio.Task[None], None] = {}
        self._losses: dict[bytes, int] = {}

    def send(self) -> None:
        """Asks for items that are wanted now and releases those that the decoder has."""
        media = self._core.state.media
        for span in media.take_wanted():
            task = asyncio.create_task(self._encode(span))
            self._calls[task] = None
            task.add_done_callback(lambda done: self._calls.pop(done, None))
        released = media.take_released()
        if released:
            self._encoders.release(released, self._user)

    def ready(self, digest: bytes) -> None:
        """The decoder has an item's embeddings."""
        self._losses.pop(digest, None)
        self._core.embeddings_ready(digest)

    def lost(self, digest: bytes) -> StepProgress:
        """The decoder could not fetch an item. One that is lost again is asked for a little later: encoder and decoder
        may be cut off for a moment.
        """
        losses = self._losses[digest] = self._losses.get(digest, 0) + 1
        if losses == 1:
            return self._core.embeddings_lost(digest)
        loop = asyncio.get_running_loop()
        loop.call_later(_LOST_AGAIN_S * (losses - 1), self._on_lost_again, digest)
        return StepProgress()

    async def close(self) -> None:
        """Ends all calls and releases everything at the encoders."""
        await tasks.end(*self._calls)
        self._encoders.release_all(self._user)

    async def _encode(self, span: MediaSpan) -> None:
        user = self._core.state.media.first_user(span.digest)
        if user is not None and user.payload is not None:
            asking: Request = user.payload.request
            spec = asking.spec
            request_names.bind(spec.request_id, spec.client_request_id, spec.traceparent)
        wanted: WantedItem = span.payload
        began = monotonic()
        log.debug("asking for an encode", digest=span.digest.hex(), rows=span.rows)
        try:
            artifact = await self._encoders.encode(
                wanted.item, self._user, self._content, wanted.numerics
            )
        except NumericsGone:
            users = self._core.state.media.users(span.digest)
            of = dict.fromkeys(s.payload.request.request_id for s in users if s.payload is not None)
            log.warning("media need other encoders' numerics", requests=len(of))
            self._on_returned(list(of))
        except ServingError as error:
            self._fail(span, error)
        except Exception as error:  # sequences that need the item would wait for ever
            log.exception("an item was not encoded", digest=span.digest.hex())
            failure = Internal("ENCODE_FAILED", f"an item was not encoded: {type(error).__name__}")
            self._fail(span, failure)
        else:
            self._note(span, began)
            self._core.embeddings_encoded(span.digest, artifact)
            self._on_change(None)

    def _note(self, span: MediaSpan, began: float) -> None:
        """An item that sequences wait for has been encoded."""
        found = self._encoders.how(span.digest)
        if found is None:
            return
        member, answer = found
        now, whose = monotonic(), {"service": "vision_encoder", "replica": member.instance_id}
        computing = max(began, now - answer.encode_us / 1e6)
        queued = max(began, computing - answer.queue_us / 1e6)
        users = self._core.state.media.users(span.digest)
        for request_id in dict.fromkeys(sequence.request_id for sequence in users):
            note = self._timelines.span
            note(request_id, "encode", began, now, **whose, rows=span.rows, cached=answer.cached)
            if not answer.cached:
                note(request_id, "encode_queue", queued, computing, **whose)
                items = answer.batch_items
                note(request_id, "encode_compute", computing, now, **whose, batch_items=items)

    def _fail(self, span: MediaSpan, error: ServingError) -> None:
        why = Error(error.reason, error.message, status_number(error.status))
        self._on_change(self._core.embeddings_failed(span.digest, why))


def _weakly(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """Calls a method as long as there is its object."""
    held = WeakMethod(method)

    def call(argument: Any) -> None:
        if (found := held()) is not None:
            found(argument)

    return call
