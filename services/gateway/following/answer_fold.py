"""From the tokens of one choice to pieces of its answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.gateway.following.logprobs import LogprobFold, TokenLogprob, read_scores
from services.gateway.following.message import Message, MessageText
from shared.errors import Internal
from shared.output_format.deltas import Delta
from shared.output_format.fold import End
from shared.queue.token_log import stride
from shared.text.reply_cleaning import ReplyCleaner
from shared.text.stop_search import StopStrings
from shared.text.text_fold import TextFold, TokenBytes
from tessera.common.v1.ending_pb2 import Ending, FinishReason
from tessera.scheduler.v1.queue_pb2 import RequestSpec

_STOP = FinishReason.FINISH_REASON_STOP
_LENGTH = FinishReason.FINISH_REASON_LENGTH


class Outcome(NamedTuple):
    """A choice that has ended: its text, the number of its tokens, and how it ended."""

    text: str
    tokens: int
    ending: Ending
    # Where the answer is divided: `text` is its content then.
    message: Message | None = None


@dataclass(slots=True)  # not frozen: that would triple the time to make one
class Piece:
    """What some tokens of one choice add. `count` is the number of its tokens folded so far: its
    part of a stream's event id. `logprobs` are empty unless they were asked for.
    """

    text: str
    token_ids: list[int]
    count: int
    ending: Ending | None
    choice: int = 0
    logprobs: Sequence[TokenLogprob] = ()

    def end_alone(self) -> "Piece":
        """The end of the choice, without what comes before it."""
        return Piece("", [], self.count, self.ending, self.choice)


@dataclass(slots=True)
class MessagePiece(Piece):
    """A piece of an answer that is divided: `text` is the content among its `deltas`. `calls_tools`: the choice ended
    by itself, and a call is whole.
    """

    deltas: Sequence[Delta] = ()
    calls_tools: bool = False

    def end_alone(self) -> "MessagePiece":
        """See `Piece`."""
        return MessagePiece(
            "", [], self.count, self.ending, self.choice, calls_tools=self.calls_tools
        )


class AnswerFold:
    """Folds tokens of one choice to pieces. What it returns after token k depends on tokens 0..k
    alone, however they arrived.
    """

    def __init__(
        self,
        table: TokenBytes,
        head: RequestSpec,
        stops: StopStrings | None,
        choice: int = 0,
        message: MessageText | None = None,
    ) -> None:
        """`stops` are those of `head`, one object for all choices; None where there are none. `message` divides the
        text, where that was asked for.
        """
        sampling, reply = head.sampling, head.reply
        self._choice = choice
        self._message = message
        self._text: TextFold | MessageText = message or TextFold(
            table,
            reply.skip_special_tokens,
            stops,
            sampling.include_stop_str_in_output,
        )
        self._cleaner = ReplyCleaner(reply.clean_up) if reply.clean_up else None
        self._stride = stride(sampling.logprobs)
        self._logprobs: LogprobFold | None = None
        if sampling.HasField("logprobs"):
            before = len(reply.prompt_text)
            self._logprobs = LogprobFold(table, reply.skip_special_tokens, before)
        self._prompt_only = reply.prompt_only
        self.count = 0

    def push(self, tokens: list[int], ending: Ending | None, records: bytes = b"") -> Piece:
        """Takes the next tokens, and the ending if they are the last. `records` is their part of
        the log, where there are log-probabilities. Raises Internal for an impossible cut.
        """
        if self._prompt_only:
            return self._hidden(ending)
        push = self._text.push
        text = push(tokens[0]) if len(tokens) == 1 else "".join([push(token) for token in tokens])
        self.count += len(tokens)
        held = self._text.held_bytes if self._logprobs is not None else 0
        if ending is not None:
            held = ending.cut
            try:
                text += self._finish(ending)
            except ValueError as error:
                raise Internal("STOP_MISMATCH", f"the stop string cannot be cut: {error}") from None
        if self._cleaner is not None:
            clean = self._cleaner.push if ending is None else self._cleaner.finish
            text = clean(text)
        logprobs: Sequence[TokenLogprob] = ()
        if self._logprobs is not None:
            for token, scores in zip(tokens, read_scores(records, self._stride), strict=True):
                self._logprobs.push(token, scores)
            logprobs = self._logprobs.release(held)
        if self._message is not None:
            calls = self._message.calls_tools and ending is not None and ending.reason == _STOP
            deltas = self._message.take()
            return MessagePiece(
                text, tokens, self.count, ending, self._choice, logprobs, deltas, calls
            )
        return Piece(text, tokens, self.count, ending, self._choice, logprobs)

    def _finish(self, ending: Ending) -> str:
        if self._message is None:
            return self._text.finish(ending.cut)
        by_itself = End.AT_STOP if ending.stop else End.BY_ITSELF
        end = by_itself if ending.reason == _STOP else End.CUT_OFF
        return self._message.finish(ending.cut, end)

    @property
    def reasoning_tokens(self) -> int:
        """Tokens in which the model thought, so far."""
        return self._message.reasoning_tokens if self._message is not None else 0

    def leave_out_logprobs(self) -> None:
        """From here on its pieces have none."""
        self._logprobs = None

    def _hidden(self, ending: Ending | None) -> Piece:
        """The piece where only the prompt is scored: no tokens, and an ending at a length of 0."""
        if ending is not None:
            ending = Ending(reason=_LENGTH, cached_tokens=ending.cached_tokens)
        return Piece("", [], 0, ending, self._choice)
