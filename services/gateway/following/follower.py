"""Follows the token logs: one subscription for the whole gateway, one `Follow` for each request it
answers.

The channel is a hint, the log is the truth. Each follow keeps a cursor for each choice, drops records
that it has, reads the log when records are missing, and reads every log again that has been silent
for a second, so that a lost message delays tokens by a second. Records that contradict known ones mean
that Redis came back with another history: the stream ends with an error then.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Self

import structlog

from services.gateway.following.choice_log import ChoiceDelta, ChoiceLog, LogLayout
from services.gateway.slices import Slices
from services.gateway.timings import USUAL, Timings
from shared.environment import monotonic
from shared.errors import Internal, NotFound, ServingError, Unavailable
from shared.net import supervise
from shared.net.supervise import Background
from shared.queue import LogDelta, Queue, TokenChannel
from shared.queue.log_event import PROMPT
from tessera.scheduler.v1.queue_pb2 import LogEvent

log = structlog.get_logger(__name__)

_RECONNECT_S = 0.2
_RESTORE_S = 8.0
_READ_AT_ONCE = 256
# Tokens, or log-probabilities of tokens: what is folded at once, and how many make a slice of a longer run.
_SMALL = 256
_SLICE = 1024
_DELTA = 8  # what is done once for each choice, as such values
# Events of the channel that are taken in without a break.
_EVENTS = 512


class Follow:
    """The logs of one request. One consumer at a time."""

    def __init__(
        self,
        follower: "Follower",
        request_id: str,
        *,
        new: bool = True,
        layout: LogLayout | None = None,
    ) -> None:
        layout = layout or LogLayout()
        self.request_id = request_id
        self.choices = [ChoiceLog(choice, layout.stride) for choice in range(layout.choices)]
        self.prompt: ChoiceLog | None = None
        if layout.prompt_records:
            self.prompt = ChoiceLog(PROMPT, layout.prompt_stride, layout.prompt_records)
        self.heard_at = monotonic()
        self.content = ""  # the weights that it has begun with, where they are known
        self.numerics = ""  # the numerics that it has begun in, where they are known
        self.is_exact = True  # as far as is known
        # Before admission there is no log to read, and that is no error.
        self.admitted = not new
        self._was_seen = new
        self._missing_since = 0.0
        self._follower = follower
        # Logs with records that `next` has not returned, in the order in which they came.
        self._fresh: dict[ChoiceLog, None] = {}
        self._failure: ServingError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def slices(self) -> Slices:
        """Those of the event loop."""
        return self._follower.slices

    @property
    def open_logs(self) -> list[ChoiceLog]:
        """The logs that will grow."""
        logs = [log for log in self.choices if log.ending is None]
        if self._awaits_prompt():
            assert self.prompt is not None
            logs.append(self.prompt)
        return logs

    @property
    def is_followed(self) -> bool:
        """Whether more is awaited."""
        return bool(self.open_logs) and self in self._follower

    @property
    def has_output(self) -> bool:
        """Whether a choice has begun, so that the prompt's log must be whole."""
        return any(
            log.tokens or (log.ending is not None and not log.broken_off) for log in self.choices
        )

    def log(self, choice: int) -> ChoiceLog | None:
        """The log of a choice; None for one that is not followed."""
        if choice == PROMPT:
            return self.prompt
        return self.choices[choice] if 0 <= choice < len(self.choices) else None

    async def next(self) -> list[ChoiceDelta]:
        """Waits for records of any choice; long ones come in slices. Empty after silence (`Timings.silence_s`).

        The prompt's log comes first and whole. A delta with an ending is the choice's last. Raises
        Internal if a log's history changed.
        """
        ready = self._deliverable()
        if not ready and self._failure is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
            ready = self._deliverable()
        if self._failure is not None:
            raise self._failure
        if not ready:
            return []
        if len(self._fresh) == 1:  # nearly always
            [only] = self._fresh
            if only.waiting * only.values_a_token <= _SMALL:
                self._fresh.clear()
                return [only.take()]
        # The prompt may have been read after output had come on the channel.
        fresh = sorted(self._fresh, key=lambda log: log.choice != PROMPT)
        if sum(_DELTA + log.waiting * log.values_a_token for log in fresh) <= _SMALL:
            self._fresh.clear()
            return [log.take() for log in fresh]
        await self._follower.slices.turn()
        return self._take_slice(fresh)

    def _take_slice(self, fresh: Sequence[ChoiceLog]) -> list[ChoiceDelta]:
        """What can be folded and written in a millisecond or two; the prompt's records are only kept."""
        taken, left = [], _SLICE
        for log in fresh:
            if left <= 0:
                break
            size = log.values_a_token
            taken.append(log.take(None if log.choice == PROMPT else max(1, left // size)))
            left -= _DELTA
            if log.choice != PROMPT:
                left -= len(taken[-1].tokens) * size
            if not log.waiting:
                del self._fresh[log]
        return taken

    def offer(self, log: ChoiceLog, event: LogEvent) -> None:
        """Takes an event of a log from the channel."""
        ending = event.ending if event.HasField("ending") else None
        self.content = self.content or event.content
        self.numerics = self.numerics or event.numerics
        self.is_exact = self.is_exact and not event.inexact
        if log.offer(event.start, event.records, ending, whole=False):
            self._heard(log)

    def offer_log(self, log: ChoiceLog, found: LogDelta | None, after: int) -> None:
        """Takes the result of reading a log from index `after` on."""
        log.needs_read = False
        if found is None:
            self._miss()
            return
        self._missing_since, self._was_seen = 0.0, True
        self.content = self.content or found.content
        self.numerics = self.numerics or found.numerics
        self.is_exact = self.is_exact and found.is_exact
        if log.offer(after, found.records, found.ending, whole=True):
            self._heard(log)

    def fail(self, failure: ServingError) -> None:
        """Makes `next` raise `failure`."""
        self._failure = failure
        self.wake()

    def wake(self) -> None:
        """Makes `next` return."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Stops following."""
        self._follower.forget(self)
        self._failure = None  # its traceback refers to this follow

    def _heard(self, log: ChoiceLog) -> None:
        if log.diverged:
            self.fail(
                Internal(
                    "STREAM_DIVERGED",
                    f"Redis came back with another history of {self.request_id}; send it again",
                )
            )
            return
        self.heard_at = log.heard_at
        self._fresh[log] = None
        if self._waiter is not None and self._deliverable():
            self.wake()

    def _deliverable(self) -> bool:
        """Whether `next` may return: output waits for the prompt's log, unless the request broke off before."""
        if not self._fresh or self.prompt is None:
            return bool(self._fresh)
        return self.prompt.complete or any(log.broken_off for log in self._fresh)

    def _awaits_prompt(self) -> bool:
        return self.prompt is not None and not self.prompt.complete

    def _miss(self) -> None:
        """Called when the request is not in Redis. It may be in the tail that a killed Redis lost: its
        owner restores it within seconds.
        """
        now = monotonic()
        self._missing_since = self._missing_since or now
        if not self._was_seen or now - self._missing_since > _RESTORE_S:
            self.fail(NotFound("REQUEST_NOT_FOUND", f"the request {self.request_id} is gone"))


class Follower:
    """All follows of a gateway. `async with` subscribes; leaving the block ends the subscription."""

    def __init__(
        self,
        queue: Queue,
        channel: TokenChannel,
        slices: Slices | None = None,
        timings: Timings = USUAL,
    ) -> None:
        """`slices` are those of the event loop, where it has other long work too."""
        self.slices = slices or Slices()
        self._queue = queue
        self._channel = channel
        self._timings = timings
        # Two clients may follow one request. A dict keeps the order in which they came.
        self._follows: dict[str, dict[Follow, None]] = {}
        self._reading: dict[Follow, dict[ChoiceLog, None]] = defaultdict(dict)
        self._wanted = asyncio.Event()
        self._tasks: list[Background] = []

    async def __aenter__(self) -> Self:
        self._tasks = [
            Background("follower's channel", self._listen),
            Background("follower's reads", self._read_wanted),
            Background("follower's silent logs", self._find_silent),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        await supervise.end(*self._tasks)

    def __len__(self) -> int:
        return sum(map(len, self._follows.values()))

    def __contains__(self, what: "Follow | str") -> bool:
        """Whether a follow is open, or whether a request is followed at all."""
        if isinstance(what, str):
            return what in self._follows
        return what in self._follows.get(what.request_id, ())

    def open_requests(self) -> list[str]:
        """The requests that are followed and have not ended."""
        return list(dict.fromkeys(f.request_id for f in self._all() if f.open_logs))

    def follow(self, request_id: str, *, new: bool, layout: LogLayout | None = None) -> Follow:
        """Follows a request from its first token on: one that is about to be admitted (`new`), or one
        already in the queue. `layout` says which logs it has; None is one choice of tokens alone.
        """
        follow = Follow(self, request_id, new=new, layout=layout)
        self._follows.setdefault(request_id, {})[follow] = None
        if not new:
            self._want(follow, *follow.open_logs)
        return follow

    def forget(self, follow: Follow) -> None:
        """Ends a follow."""
        follows = self._follows.get(follow.request_id)
        if follows is not None:
            follows.pop(follow, None)
            if not follows:
                del self._follows[follow.request_id]
        self._reading.pop(follow, None)

    async def _listen(self) -> None:
        away = False
        events = 0
        while True:
            try:
                async for batch in self._channel.batches():
                    away = False
                    events += len(batch.events)
                    if events > _EVENTS:  # batches that are there already are given without a break
                        await asyncio.sleep(0)
                        events = len(batch.events)
                    for event in batch.events:
                        for follow in self._follows.get(event.request_id, ()):
                            self._offer(follow, event)
            except Unavailable as error:
                if not away:
                    log.warning("the token channel is lost, connecting again", error=error.message)
                away = True
            # What was published meanwhile is in the logs; if Redis died these may have changed.
            for follow in self._all():
                for known in follow.open_logs:
                    known.doubt()
                self._want(follow, *follow.open_logs)
            await asyncio.sleep(_RECONNECT_S)

    def _offer(self, follow: Follow, event: LogEvent) -> None:
        known = follow.log(event.choice)
        if known is None:
            return
        follow.offer(known, event)
        if known.needs_read:
            self._want(follow, known)
        if follow.prompt is not None and known is not follow.prompt and not follow.prompt.complete:
            self._want(follow, follow.prompt)

    async def _find_silent(self) -> None:
        reread_s, silence_s = self._timings.reread_s, self._timings.silence_s
        while True:
            await asyncio.sleep(reread_s)
            now = monotonic()
            for follow in self._all():
                self._want(follow, *[o for o in follow.open_logs if now - o.heard_at >= reread_s])
                if now - follow.heard_at >= silence_s:
                    follow.heard_at = now
                    follow.wake()

    async def _read_wanted(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            reading, self._reading = self._reading, defaultdict(dict)
            # One read returns records of one size.
            wanted: dict[int, list[tuple[Follow, ChoiceLog]]] = defaultdict(list)
            for follow, logs in reading.items():
                for found in logs:
                    wanted[found.stride].append((follow, found))
            for stride, pairs in wanted.items():
                for start in range(0, len(pairs), _READ_AT_ONCE):
                    with contextlib.suppress(
                        Unavailable
                    ):  # the next check of silent logs reads again
                        await self._read(pairs[start : start + _READ_AT_ONCE], stride)

    async def _read(self, wanted: list[tuple[Follow, ChoiceLog]], stride: int) -> None:
        cursors = [(follow.request_id, o.choice, o.cursor) for follow, o in wanted]
        # Output is logged after the whole prompt: if it was known before this read, the prompt must be in it.
        due = [o.choice == PROMPT and follow.has_output for follow, o in wanted]
        deltas = await self._queue.read_deltas(cursors, stride=stride)
        for (follow, o), (_, _, after), must, found in zip(
            wanted, cursors, due, deltas, strict=True
        ):
            follow.offer_log(o, found, after)
            if must and found is not None and not o.complete:
                follow.fail(
                    Internal("PROMPT_LOGPROBS_LOST", "the prompt's log-probabilities are not whole")
                )

    def _want(self, follow: Follow, *logs: ChoiceLog) -> None:
        if logs:
            self._reading[follow].update(dict.fromkeys(logs))
            self._wanted.set()

    def _all(self) -> list[Follow]:
        return [f for follows in self._follows.values() for f in follows if f.admitted]
