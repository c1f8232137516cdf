"""The answer to one accepted request: for each choice a pure fold from tokens to pieces of text,
and the follow that they read from.
"""

import json
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import structlog

from services.gateway.endings import COMPLETED, failure_of
from services.gateway.following.answer_fold import AnswerFold, MessagePiece, Outcome, Piece
from services.gateway.following.choice_log import ChoiceDelta
from services.gateway.following.event_id import OPEN, TEXT_SENT, Progress
from services.gateway.following.follower import Follow
from services.gateway.following.logprobs import (
    LogprobFold,
    PromptScores,
    Scores,
    TokenLogprob,
    read_scores,
)
from services.gateway.following.message import Message, MessageText
from services.gateway.model.output_forms import OutputForms
from services.gateway.slices import Slices
from services.gateway.telemetry.metrics.metrics import Metrics, finish_reason
from services.gateway.telemetry.request_log import log_end
from services.gateway.telemetry.timeline import Timeline
from shared.environment import monotonic
from shared.errors import Cancelled, Internal, ServingError
from shared.output_format.deltas import Delta
from shared.queue.log_event import PROMPT
from shared.queue.token_log import decode_pooled, stride
from shared.telemetry.request_names import names, trace_of
from shared.telemetry.timeline import Timelines
from shared.text.stop_search import StopStrings
from shared.text.text_fold import TokenBytes
from tessera.common.v1.ending_pb2 import Ending, FinishReason
from tessera.scheduler.v1.queue_pb2 import RequestSpec

__all__ = ["Answer", "AnswerFold", "Outcome", "Piece"]

log = structlog.get_logger(__name__)

# A time without a token that stands in the request's timeline.
_PAUSE_S = 0.5
# After which what others have seen of a request that has ended is written.
_TRACE_DUE_MS = 2_000
# Log-probabilities that are read at once.
_SLICE = 1024


class Answer:
    """The answer to one accepted request, from its beginning or from where its client is already. It
    must be closed.
    """

    def __init__(
        self,
        head: RequestSpec,
        prompt_tokens: int,
        table: TokenBytes,
        follow: Follow,
        metrics: Metrics,
        *,
        own_eos_ids: Collection[int],
        prompt_ids: list[int] | None,
        arrived_at: float,
        leave: Callable[[], bool],
        progress: Progress | None = None,
        forms: OutputForms | None = None,
        timelines: Timelines | None = None,
    ) -> None:
        """`prompt_ids` only where the answer shows them. `leave` is called if the answer is closed
        before its end: it cancels the request, or returns True if the request lives on. `progress` is
        what the client has already; such an answer's tokens and times are not counted in metrics. `forms` are needed
        where the answer is divided. `timelines` get what happens to the answer. Raises Unavailable for a form that is
        not known here.
        """
        self.head = head
        self.prompt_tokens = prompt_tokens
        self.prompt_ids = prompt_ids
        # With `ignore_eos` the model's own end is a stop id like any other.
        self.silent_ends: Collection[int] = () if head.sampling.ignore_eos else own_eos_ids
        self.table = table
        # None until they are known.
        self.prompt_scores: PromptScores | None = None
        if follow.prompt is None:
            self.prompt_scores = PromptScores(b"", stride(None))
        self.cached_tokens = 0
        self.progress = progress or Progress.beginning(len(follow.choices))
        self._stops = StopStrings(head.sampling.stop) if head.sampling.stop else None
        choices = range(len(follow.choices))
        divide = _divider(table, head, self._stops, forms)
        self._divide = divide
        self._folds = [AnswerFold(table, head, self._stops, choice, divide()) for choice in choices]
        self._open = len(self._folds)
        # The choices of which the client has more than has been folded here yet.
        self._behind = {
            choice
            for choice, place in enumerate(
                zip(self.progress.counts, self.progress.ends, strict=True)
            )
            if place != (0, OPEN)
        }
        self._follow = follow
        self._metrics = metrics
        self._timeline = Timeline(arrived_at, monotonic())
        self._last_at = [0.0] * len(self._folds)
        self._is_counted = progress is None
        self._leave = leave
        self._timelines = timelines or Timelines("", "")
        self._first_at = self._longest_pause_s = 0.0
        if not self._is_counted:
            tokens = sum(self.progress.counts)
            self._timelines.moment(head.request_id, "resumed", tokens=tokens)
        self._error: ServingError | None = None
        self._closed = False
        # Whether somebody else reads it, and closes it, when the exchange that it was made for has ended.
        self.outlives_exchange = False

    @property
    def completion_tokens(self) -> int:
        """Tokens of all choices known so far, as the client sees them."""
        if self.head.reply.prompt_only:
            return 0
        return sum(len(choice.tokens) for choice in self._follow.choices)

    @property
    def timeline(self) -> Timeline | None:
        """Its times so far; None where it was not followed from its beginning."""
        return self._timeline if self._is_counted else None

    @property
    def reasoning_tokens(self) -> int:
        """Tokens in which the model thought, of all choices so far."""
        return sum(fold.reasoning_tokens for fold in self._folds)

    @property
    def slices(self) -> Slices:
        """Those of the event loop, for what takes long."""
        return self._follow.slices

    @property
    def ended(self) -> bool:
        """Whether every choice has ended."""
        return self._open == 0

    @property
    def broke_off(self) -> bool:
        """Whether a choice failed or was cancelled: the request is over."""
        return any(choice.broken_off for choice in self._follow.choices)

    async def next(self) -> list[Piece]:
        """The next pieces, of all tokens that are waiting; the last one of a choice has its ending.
        Empty after 10 s of silence, or when the prompt's scores have come.

        Raises the error that ended a choice: it ends the whole answer, after what came before it.
        """
        if self._error is not None:
            raise self._error
        pieces = []
        try:
            fresh = await self._follow.next()
        except ServingError as error:
            self._error = error
            raise
        for delta in fresh:
            if delta.choice == PROMPT:
                prompt_stride = stride(self.head.sampling.prompt_logprobs)
                self.prompt_scores = PromptScores(delta.records, prompt_stride)
                continue
            fold = self._catch_up if delta.choice in self._behind else self._fold
            piece = fold(delta)
            if piece is not None:
                pieces.append(piece)
        if self._error is not None and not pieces:
            raise self._error
        return pieces

    async def whole(self) -> list[Outcome]:
        """Waits for the end, and closes: each choice, but for its log-probabilities. Raises what `next` raises."""
        for fold in self._folds:
            fold.leave_out_logprobs()
        texts: list[list[str]] = [[] for _ in self._folds]
        deltas: list[list[Delta]] = [[] for _ in self._folds]
        outcomes: dict[int, Outcome] = {}
        while not self.ended:
            for piece in await self.next():
                texts[piece.choice].append(piece.text)
                message = None
                if isinstance(piece, MessagePiece):
                    deltas[piece.choice] += piece.deltas
                    if piece.ending is not None:
                        message = Message.of(deltas[piece.choice], piece.calls_tools)
                if piece.ending is not None:
                    text = "".join(texts[piece.choice])
                    outcomes[piece.choice] = Outcome(text, piece.count, piece.ending, message)
        self.close()
        return [outcomes[choice] for choice in range(len(self._folds))]

    async def vector(self) -> npt.NDArray[np.float32]:
        """Waits for the end, and closes: what a pooled prompt became. Raises what `next` raises."""
        while not self.ended:
            await self.next()
        self.close()
        return decode_pooled(self._follow.choices[0].records)

    def token_ids(self, choice: int) -> Sequence[int]:
        """The tokens of a choice that are known so far, as the client sees them."""
        return () if self.head.reply.prompt_only else self._follow.choices[choice].tokens

    def fold(self, choice: int, *, with_logprobs: bool = False) -> AnswerFold:
        """Another fold of a choice, which has no tokens yet: it gives the same pieces, without log-probabilities unless
        those are wanted, which takes `records`.
        """
        fold = AnswerFold(self.table, self.head, self._stops, choice, self._divide())
        if not with_logprobs:
            fold.leave_out_logprobs()
        return fold

    def records(self, choice: int, start: int, end: int) -> bytes:
        """What the log holds of the tokens [start, end) of a choice beside them; empty where that is nothing."""
        return self._follow.choices[choice].records_of(start, end)

    def text(self, choice: int, count: int | None = None) -> str:
        """The text of a choice as far as it is sure: of its first `count` tokens, or of all that are known, to its end
        where that is known too. Folded anew from its log.
        """
        log = self._follow.choices[choice]
        fold = AnswerFold(self.table, self.head, self._stops, choice)
        fold.leave_out_logprobs()
        known = log.ending if count is None else None
        ending = known if known is not None and known.reason in COMPLETED else None
        return fold.push(log.tokens[:count], ending).text

    def scores(self, choice: int, start: int, end: int) -> list[Scores]:
        """The log-probabilities of the tokens [start, end) of a choice, which are known, where they were asked for."""
        log = self._follow.choices[choice]
        return read_scores(log.records_of(start, end), log.stride)

    def logprobs(self, choice: int) -> Iterator[TokenLogprob]:
        """Yields the log-probabilities of a choice that has ended, read anew from its log."""
        log, reply = self._follow.choices[choice], self.head.reply
        if reply.prompt_only or log.ending is None:
            return
        fold = LogprobFold(self.table, reply.skip_special_tokens, len(reply.prompt_text))
        size = max(1, _SLICE // log.values_a_token)
        for start in range(0, len(log.tokens), size):
            tokens = log.tokens[start : start + size]
            records = log.records_of(start, start + len(tokens))
            for token, scores in zip(tokens, read_scores(records, log.stride), strict=True):
                fold.push(token, scores)
            yield from fold.release(log.ending.cut)

    def close(self) -> None:
        """Ends the answer, and leaves the request if it has not ended. May be called again."""
        if self._closed:
            return
        self._closed = True
        self._follow.close()
        error, self._error = self._error, None  # whose traceback refers to this answer
        endings = [choice.ending for choice in self._follow.choices]
        lives_on = None in endings and self._leave()
        if lives_on:
            self._timelines.moment(self.head.request_id, "client_left")
            log.info(
                "client left, the request goes on",
                **self._names,
            )
            return
        timeline, worst = self._timeline, _worst(endings)
        timeline.ended = monotonic()
        known = [ending for ending in endings if ending is not None]
        queued = [ending.queued_us for ending in known if ending.HasField("queued_us")]
        timeline.queue_s = min(queued) / 1e6 if queued else None
        hidden = self.head.reply.prompt_only
        self._note_end(worst, error)
        if self._is_counted:
            self._metrics.ended(
                worst,
                timeline,
                prompt_tokens=self.prompt_tokens,
                cached_tokens=max((ending.cached_tokens for ending in known), default=None),
                preemptions=max((ending.preemptions for ending in known), default=0),
                answers=[0 if hidden else len(c.tokens) for c in self._follow.choices],
                max_tokens=self.head.sampling.max_tokens,
                trace_id=self._exported_trace,
            )
        log_end(
            self.head,
            timeline,
            endings,
            worst,
            error,
            self._metrics.errors,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.completion_tokens,
            resumed=not self._is_counted,
        )

    @property
    def _exported_trace(self) -> str:
        """The id of its trace, "" where that is not exported."""
        head = self.head
        return trace_of(head.request_id, head.traceparent) if head.traced else ""

    @property
    def _names(self) -> dict[str, str]:
        head = self.head
        return names(head.request_id, head.client_request_id, head.traceparent)

    def _note_end(self, worst: Ending | None, error: ServingError | None) -> None:
        rid, timeline, note = self.head.request_id, self._timeline, self._timelines.span
        if self._first_at:
            tokens, pause_us = self.completion_tokens, round(1e6 * self._longest_pause_s)
            note(
                rid,
                "deliver",
                self._first_at,
                timeline.ended,
                tokens=tokens,
                longest_pause_us=pause_us,
            )
        at = timeline.ended
        if error is None:
            note(rid, "end", at, at, finish=finish_reason(worst))
        else:
            note(rid, "end", at, at, finish=error.reason, status=error.http_status)
        if self.head.traced:
            self._timelines.due(rid, _TRACE_DUE_MS)

    def _fold(self, delta: ChoiceDelta) -> Piece | None:
        ending = delta.ending
        if delta.tokens:
            self._time(delta.choice, len(delta.tokens))
        if ending is not None and ending.reason not in COMPLETED:
            self._error = self._error or _error_of(ending, self.head)
            ending = None
        if ending is not None:
            self._open -= 1
            self.cached_tokens = max(self.cached_tokens, ending.cached_tokens)
        elif not delta.tokens:
            return None
        return self._folds[delta.choice].push(delta.tokens, ending, delta.records)

    def _catch_up(self, delta: ChoiceDelta) -> Piece | None:
        """Folds what the client has, and returns the piece of what it does not have."""
        choice, ending = delta.choice, delta.ending
        fold, sent = self._folds[choice], self.progress.ends[choice]
        missing = self.progress.counts[choice] - fold.count
        size = len(delta.records) // max(1, len(delta.tokens)) * missing
        fold.push(delta.tokens[:missing], None, delta.records[:size])
        rest = ChoiceDelta(choice, delta.tokens[missing:], delta.records[size:], ending)
        if fold.count < self.progress.counts[choice]:
            if ending is None:  # Redis lost its last second: the tokens are logged again
                return None
            if ending.reason in COMPLETED:
                raise _diverged(self.head.request_id)
            return self._fold(rest)
        if sent == OPEN:
            self._behind.discard(choice)
            return self._fold(rest)
        if rest.tokens and not self.head.reply.prompt_only:
            raise _diverged(self.head.request_id)
        if ending is None:
            return None
        self._behind.discard(choice)
        last = self._fold(rest)
        if last is None or sent != TEXT_SENT:
            return None
        return last.end_alone()

    def _time(self, choice: int, tokens: int) -> None:
        now = monotonic()
        is_counted = self._is_counted and not self.head.reply.prompt_only
        if self._last_at[choice]:
            pause_s = now - self._last_at[choice]
            if pause_s > self._longest_pause_s:
                self._longest_pause_s = pause_s
                if pause_s > _PAUSE_S:
                    self._timelines.span(
                        self.head.request_id, "pause", self._last_at[choice], now, choice=choice
                    )
            if is_counted:
                self._metrics.inter_token((now - self._last_at[choice]) / tokens, tokens)
        elif is_counted and tokens > 1:  # they came with the first
            self._metrics.inter_token(0.0, tokens - 1)
        if not self._first_at:
            self._first_at = now
            self._timelines.span(self.head.request_id, "first_token", now, now)
        if self._is_counted and not self._timeline.first_token:
            self._timeline.first_token = now
            self._metrics.first_token(
                now - self._timeline.arrived, self.prompt_tokens, self._exported_trace
            )
            log.debug("first token", **self._names)
        if is_counted:
            self._metrics.generated(tokens)
        self._last_at[choice] = self._timeline.last_token = now


def _divider(
    table: TokenBytes, head: RequestSpec, stops: StopStrings | None, forms: OutputForms | None
) -> Callable[[], MessageText | None]:
    """Makes what divides each choice. Raises Unavailable."""
    reply = head.reply
    if forms is None or not reply.HasField("message"):
        return lambda: None
    form = forms.of(reply.message)
    schemas = json.loads(reply.message.schemas_json or "{}")
    return lambda: MessageText(table, head, stops, form, schemas)


def _diverged(request_id: str) -> Internal:
    return Internal(
        "STREAM_DIVERGED",
        f"the answer to {request_id} is not the one whose end was sent before; send it again",
    )


def _error_of(ending: Ending, head: RequestSpec) -> ServingError:
    if ending.reason == FinishReason.FINISH_REASON_CANCELLED:
        return Cancelled("CANCELLED", f"the request {head.request_id} was cancelled")
    return failure_of(ending, head.reply)


def _worst(endings: Sequence[Ending | None]) -> Ending | None:
    """The ending of the request as a whole: the first failed one, else None if a choice is open, else the
    first.
    """
    for ending in endings:
        if ending is not None and ending.reason not in COMPLETED:
            return ending
    return None if None in endings else endings[0]
