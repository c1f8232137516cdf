"""The answer to one accepted request: a pure fold from tokens to pieces of text, and the follow
that feeds it.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from services.gateway.follower import Follow
from services.gateway.metrics import Metrics
from shared import errors
from shared.errors import Cancelled, Internal
from shared.text import TextFold, TokenBytes
from tessera.common.v1.ending_pb2 import Ending, FinishReason
from tessera.scheduler.v1.queue_pb2 import RequestSpec


@dataclass(frozen=True, slots=True)
class Piece:
    """What some tokens add. `count` is the number of tokens folded so far: the event id of a
    stream.
    """

    text: str
    token_ids: list[int]
    count: int
    ending: Ending | None


class AnswerFold:
    """Tokens to pieces. What it gives after token k depends on tokens 0..k alone, however they
    arrived.
    """

    def __init__(self, table: TokenBytes, head: RequestSpec) -> None:
        sampling = head.sampling
        self._text = TextFold(
            table,
            head.reply.skip_special_tokens,
            list(sampling.stop),
            sampling.include_stop_str_in_output,
        )
        self._count = 0

    def push(self, tokens: list[int], ending: Ending | None) -> Piece:
        """Takes the next tokens, and the ending if they are the last. Raises Internal for an
        impossible cut.
        """
        push = self._text.push
        text = push(tokens[0]) if len(tokens) == 1 else "".join([push(token) for token in tokens])
        self._count += len(tokens)
        if ending is not None:
            try:
                text += self._text.finish(ending.cut)
            except ValueError as error:
                raise Internal("STOP_MISMATCH", f"the stop string cannot be cut: {error}") from None
        return Piece(text, tokens, self._count, ending)


class Answer:
    """One accepted request being answered. `close` is due in any case; before the ending it cancels
    the request.
    """

    def __init__(
        self,
        head: RequestSpec,
        prompt_tokens: int,
        fold: AnswerFold,
        follow: Follow,
        metrics: Metrics,
        *,
        eos_token_ids: Collection[int],
        prompt_ids: list[int] | None,
        arrived_at: float,
        cancel: Callable[[], None],
    ) -> None:
        """`prompt_ids` only where the client wants them; `cancel` is called if the client leaves
        early.
        """
        self.head = head
        self.prompt_tokens = prompt_tokens
        self.prompt_ids = prompt_ids
        self.eos_token_ids = eos_token_ids
        self._fold = fold
        self._follow = follow
        self._metrics = metrics
        self._arrived_at = arrived_at
        self._last_at = 0.0
        self._cancel = cancel
        self._closed = False

    @property
    def completion_tokens(self) -> int:
        """Tokens known so far."""
        return len(self._follow.tokens)

    async def next(self) -> Piece | None:
        """The next piece, of all tokens that are waiting; the last one has the ending. None after
        10 s of silence.

        Raises the error that ended the request.
        """
        tokens = await self._follow.next()
        ending = self._follow.ending
        if tokens:
            self._time(len(tokens))
        if ending is None:
            return self._fold.push(tokens, None) if tokens else None
        if ending.reason in (FinishReason.FINISH_REASON_STOP, FinishReason.FINISH_REASON_LENGTH):
            return self._fold.push(tokens, ending)
        if tokens:  # what came before the error is given first
            return self._fold.push(tokens, None)
        if ending.reason == FinishReason.FINISH_REASON_CANCELLED:
            raise Cancelled("CANCELLED", f"the request {self.head.request_id} was cancelled")
        raise errors.from_failure(ending.failure)

    def close(self) -> None:
        """Ends the answer. Cancels the request if it has not ended. May be called again."""
        if self._closed:
            return
        self._closed = True
        self._follow.close()
        ending = self._follow.ending
        if ending is None:
            self._cancel()
        self._metrics.ended(
            ending,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.completion_tokens,
            duration_s=time.monotonic() - self._arrived_at,
        )

    def _time(self, tokens: int) -> None:
        now = time.monotonic()
        if self._last_at:
            self._metrics.inter_token((now - self._last_at) / tokens)
        else:
            self._metrics.first_token(now - self._arrived_at)
        self._last_at = now
