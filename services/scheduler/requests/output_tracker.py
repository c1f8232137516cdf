"""The requests that this scheduler owns: which decoder runs each, and which of its tokens are logged."""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Vectors
from itertools import chain, compress

import structlog

from services.scheduler.core.beams import BeamSearch
from services.scheduler.core.plan import Progress, StepPlan, StepProgress
from services.scheduler.core.sequence import INVALID_ARGUMENT, Ending, EndReason, Error, Sequence
from services.scheduler.decoders.convert import ending_message
from services.scheduler.decoders.link import DecoderLink
from services.scheduler.output.choice import Choice
from services.scheduler.output.log_writer import LogWriter
from services.scheduler.output.logprobs import StepLogprobs, prompt_records
from services.scheduler.output.request import Request, Unreadable
from shared.environment import monotonic
from shared.queue import TakenRequest
from shared.queue.log_event import token_middle
from shared.queue.token_log import encode_pooled, encode_tokens
from shared.telemetry.timeline import Timelines
from tessera.decoder.v1 import decoder_pb2

log = structlog.get_logger(__name__)

# Its gateway says it earlier, when the client has all; a gateway that is lost does not.
_TRACE_DUE_MS = 60_000
KEPT_S = 10.0  # an ended request, in case Redis loses its last writes


class _Batch:
    """Events of the token log, each with the choice that it belongs to."""

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.choices: list[Choice] = []
        self.noted: list[tuple[str, str]] = []  # requests, and what of them is new to their logs

    def add(
        self,
        choice: Choice,
        start: int,
        records: bytes,
        ending: Ending | None = None,
        cached_tokens: int = 0,
        of: Request | None = None,
    ) -> None:
        """Records of a choice of a request from index `start` on, and its ending."""
        queue_s, preemptions = None, 0
        if of is not None and ending is not None:
            queue_s, preemptions = of.queue_s, of.num_preemptions
        message = ending_message(ending, cached_tokens, queue_s, preemptions)
        self.events.append(choice.event(start, records, message))
        self.choices.append(choice)
        if of is not None and (ending is not None or not start):
            noted = (of.request_id, "end" if ending is not None else "first_token")
            if noted not in self.noted[-1:]:  # several choices of a request
                self.noted.append(noted)


class OutputTracker:
    """Turns what steps give into events of the token log. `on_end` is called when a request leaves; those that have
    ended are kept for `kept_s`.
    """

    def __init__(
        self,
        writer: LogWriter,
        on_end: Callable[[], None],
        timelines: Timelines,
        kept_s: float = KEPT_S,
    ) -> None:
        self._kept_s = kept_s
        self._writer = writer
        self._on_end = on_end
        self._timelines = timelines
        # Without a link: no decoder runs it, and it goes back to the queue.
        self._owners: dict[str, tuple[DecoderLink | None, Request]] = {}
        self._ended: deque[tuple[float, Request]] = deque()
        self.num_tokens = 0  # committed so far

    @property
    def num_requests(self) -> int:
        """All requests that have not ended."""
        return len(self._owners)

    @property
    def request_ids(self) -> list[str]:
        """All requests that have not ended."""
        return list(self._owners)

    @property
    def unassigned(self) -> list[str]:
        """Requests that no decoder runs."""
        return [rid for rid, (link, _) in self._owners.items() if link is None]

    @property
    def requests(self) -> list[Request]:
        """All requests, and those that have ended a short while ago."""
        self.forget_ended()
        return [
            *(request for _, request in self._owners.values()),
            *(request for _, request in self._ended),
        ]

    def has(self, request_id: str) -> bool:
        """Whether a request is owned and has not ended."""
        return request_id in self._owners

    def find(self, request_id: str) -> Request | None:
        """The request, if it is owned and has not ended."""
        return self._owners[request_id][1] if request_id in self._owners else None

    def of(self, link: DecoderLink) -> list[Request]:
        """Requests that one decoder runs, by arrival."""
        return [request for owner, request in self._owners.values() if owner is link]

    def hold(self, request: Request) -> None:
        """Keeps a request that no decoder can take now."""
        self._owners[request.request_id] = (None, request)

    def end_untried(self, request: Request, ending: Ending) -> None:
        """Ends a request that it is too late for."""
        self.hold(request)
        self.end(request.request_id, ending)

    def unassign(self, request_ids: list[str], why: str) -> None:
        """No decoder runs these any more, `why`; they are kept until the queue has them."""
        for request_id in request_ids:
            link, request = self._owners[request_id]
            self._owners[request_id] = (None, request)
            if link is not None:
                link.trace.left(request, why)
                link.core.cancel(request_id)

    def forget(self, request_ids: list[str]) -> None:
        """These unassigned requests have another owner now."""
        for request_id in request_ids:
            if request_id in self._owners and self._owners[request_id][0] is None:
                _, request = self._owners.pop(request_id)
                self._timelines.moment(request_id, "given_back")
                request.clear()

    def move(self, request_id: str, target: DecoderLink) -> Request:
        """Moves a request to another decoder, where it goes on; tokens in flight are computed again there."""
        link, request = self._owners[request_id]
        if link is not None:
            link.trace.left(request, "it moves to another decoder")
            link.core.cancel(request_id)
        moved = request.again()
        request.clear()
        self.accept(target, moved)
        return moved

    def accept(self, link: DecoderLink, request: Request) -> None:
        """Gives a request to a decoder, or ends it if it can never run there."""
        self._owners[request.request_id] = (link, request)
        request.place(link.hello)
        link.trace.placed(request, link.core.state)
        log.debug("given to a decoder", **request.names, decoder=link.member.instance_id)
        resumed = [[s] for s in request.sequences if s.num_output_tokens]
        for group in [request.fresh, *resumed] if request.fresh else resumed:
            ending = Ending(EndReason.ERROR, error=request.error) if request.error else None
            ending = ending or request.over.get(group[0].choice) or link.core.add(*group)
            if ending is not None:
                progress = StepProgress()
                for sequence in group:
                    sequence.refuse()
                    progress.add(sequence, None, ending)
                self.on_step(progress)

    def refuse(self, taken: TakenRequest, why: str) -> None:
        """Ends a request that cannot even be read."""
        owner = Unreadable(taken.spec.request_id)
        error = Error("BAD_REQUEST", f"the request cannot be read: {why}", INVALID_ARGUMENT)
        batch = _Batch()
        for number, ending in enumerate(taken.endings):
            if ending is None:
                batch.add(Choice(owner, number, None), 0, b"", Ending(EndReason.ERROR, error=error))
        self._submit(batch)

    def on_step(
        self,
        progress: StepProgress,
        plan: StepPlan | None = None,
        result: decoder_pb2.StepResult | None = None,
    ) -> None:
        """Logs what a step gave, in one piece. Without a plan it is endings alone."""
        batch = _Batch()
        raw, logprobs = b"", None
        pooled: Vectors[bytes] = ()
        if plan is not None and result is not None:
            raw, pooled = result.tokens, result.pooled
            if result.prompt_logprobs:
                self._log_prompts(batch, plan, result)
            if result.logprobs:
                logprobs = StepLogprobs(plan, result)
        # Events of a token alone are built in bulk: this is the busiest place of the process.
        payloads: list[Choice] = [s.payload for s in progress.sequences]
        prefixes = [choice.token_prefix for choice in payloads]
        for index in progress.endings:
            prefixes[index] = b""
        tokens = [raw[4 * i : 4 * i + 4] for i in compress(progress.samples, prefixes)]
        middles = map(token_middle, compress(progress.starts, prefixes))
        batch.events += chain.from_iterable(
            zip(compress(prefixes, prefixes), middles, tokens, strict=True)
        )
        batch.choices += compress(payloads, prefixes)
        if len(tokens) < len(prefixes):
            for prefix, one in zip(prefixes, progress, strict=True):
                if not prefix:
                    self._log_one(batch, one, logprobs, pooled)
        for search in progress.beams:
            self._log_beams(batch, search)
        self.num_tokens += len(progress) - progress.tokens.count(None)
        self._submit(batch)

    def _submit(self, batch: _Batch) -> None:
        self._writer.submit(b"".join(batch.events), batch.choices, batch.noted)

    def _log_one(
        self,
        batch: _Batch,
        progress: Progress,
        logprobs: StepLogprobs | None,
        pooled: Vectors[bytes],
    ) -> None:
        """A token with log-probabilities, or of a ranked output, or a vector, or an ending, or both."""
        sequence, start, token, ending, sample, pool = progress
        request: Request = sequence.payload.request
        record = b""
        if token is not None:
            record = encode_tokens([token])
            if request.logprobs is not None and logprobs is not None:
                record = logprobs.record(sample, token, request.logprobs)
        elif pool >= 0:
            record = encode_pooled(pooled[pool])
        if request.ranking is None:
            cached = sequence.num_cached_tokens
            batch.add(sequence.payload, start, record, ending, cached, request)
            if ending is not None:
                self._leave(request, sequence)
            return
        output = request.ranking[sequence.choice]
        if token is not None and logprobs is not None:
            output.add(record, logprobs.own(sample))
        if ending is not None:
            output.ending = ending
            self._end_ranked(batch, request, sequence, ending)

    def _end_ranked(
        self,
        batch: _Batch,
        request: Request,
        sequence: Sequence,
        ending: Ending,
    ) -> None:
        """When the last output has ended, the best are logged; when one fails, so does the request."""
        if not self.has(request.request_id):
            return
        if ending.reason is EndReason.ERROR:
            link = self._drop(request)
            if link is not None:
                link.core.cancel(request.request_id)
            self._end_all(batch, request, ending)
            self._on_end()
        elif self._leave(request, sequence) and request.ranking is not None:
            cached = sequence.num_cached_tokens
            for number, best in enumerate(request.ranking.best()):
                choice, records = request.choice(number), bytes(best.records)
                batch.add(choice, 0, records, best.ending, cached, request)

    def _log_beams(self, batch: _Batch, search: BeamSearch[Sequence]) -> None:
        """A search has ended: its best hypotheses are logged at once."""
        first = search.live[0]
        request: Request = first.payload.request
        self._drop(request)
        cached = first.num_cached_tokens
        for number in range(request.num_choices):
            records, ending = request.hypothesis(search, number)
            batch.add(request.choice(number), 0, records, ending, cached, request)
        self._on_end()

    def _log_prompts(
        self,
        batch: _Batch,
        plan: StepPlan,
        result: decoder_pb2.StepResult,
    ) -> None:
        """Log-probabilities of prompt tokens come before any output of their request."""
        for sequence, first, own, ids, values in prompt_records(plan, result):
            # The answer to an old plan may come when its request is over and forgotten.
            request: Request | None = sequence.payload and sequence.payload.request
            if request is not None and request.prompt_log is not None:
                records = request.prompt_records(first, own, ids, values)
                batch.add(request.prompt_log, first - 1, records)

    def _leave(self, request: Request, sequence: Sequence) -> bool:
        """One of its sequences has ended. Returns whether it was the last."""
        request.sequences.remove(sequence)
        if request.sequences:
            return False
        self._drop(request)
        self._on_end()
        return True

    def _drop(self, request: Request) -> "DecoderLink | None":
        """It has ended. Returns the link that ran it."""
        link, _ = self._owners.pop(request.request_id, (None, request))
        if link is not None:
            link.trace.left(request)
        self._timelines.moment(request.request_id, "ended")
        if request.spec.traced:
            self._timelines.due(request.request_id, _TRACE_DUE_MS)
        log.debug("ended", **request.names)
        self.forget_ended()
        self._ended.append((monotonic(), request))
        return link

    def forget_ended(self) -> None:
        """Lets go of requests that have ended so long ago that Redis cannot lose their ends any more."""
        horizon = monotonic() - self._kept_s
        while self._ended and self._ended[0][0] < horizon:
            _, request = self._ended.popleft()
            request.clear()

    def _end_all(self, batch: _Batch, request: Request, ending: Ending) -> None:
        for choice in request.open_choices():
            start = cached = 0
            if choice.sequence is not None:
                start = choice.sequence.num_output_tokens
                cached = choice.sequence.num_cached_tokens
            batch.add(choice, start, b"", ending, cached, request)

    # Events from outside

    def on_cancel(self, request_id: str) -> None:
        """Its client has cancelled it."""
        self.end(request_id, Ending(EndReason.CANCELLED))

    def end(self, request_id: str, ending: Ending) -> None:
        """Ends all choices of a request that have not ended, for a reason outside of it."""
        if request_id not in self._owners:
            return
        _, request = self._owners[request_id]
        link = self._drop(request)
        batch = _Batch()
        self._end_all(batch, request, ending)
        self._submit(batch)
        if link is not None:
            link.core.cancel(request_id)
            link.pump()
        self._on_end()

    def on_refused(self, request_id: str) -> None:
        """It has another owner."""
        link, request = self._owners.pop(request_id, (None, None))
        if request is None:
            return
        if link is not None:
            link.trace.left(request, "it has another owner")
        if link is not None and link.core.cancel(request_id):
            log.warning("request has another owner", **request.names)
            link.pump()
        request.clear()
