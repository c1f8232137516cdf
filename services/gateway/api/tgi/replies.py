"""TGI's replies: one object, or an event for each token."""

from collections.abc import Iterator
from json.encoder import encode_basestring
from typing import Any

from services.gateway.api.compact_json import compact
from services.gateway.api.server_sent_events import EventStream
from services.gateway.api.tgi.errors import error_body
from services.gateway.endings import end_name
from services.gateway.following.answer import Answer, Outcome, Piece
from services.gateway.following.logprobs import Scores
from services.gateway.following.token_texts import TokenTexts
from shared.errors import ServingError
from tessera.common.v1.ending_pb2 import Ending

_SLICE = 256


class TokenWriter(EventStream):
    """The events of one answer. What follows a token depends on the tokens up to it alone."""

    def __init__(self, answer: Answer, with_ids: bool) -> None:
        super().__init__(answer, with_ids)
        self._answer = answer
        self._done = answer.progress.counts[0]
        self._texts: TokenTexts | None = None
        self._with_scores = answer.head.sampling.HasField("logprobs")

    def accepted(self) -> bytes:
        """Nothing."""
        return b""

    def first(self) -> Iterator[str]:
        """Nothing."""
        return iter(())

    def piece(self, piece: Piece) -> bytes:
        """An event for each token; the last one has the whole text."""
        if self._texts is None:
            self._texts = TokenTexts(self._answer, 0, self._done)
        tokens: list[int | None] = [*piece.token_ids]
        if not tokens and piece.ending is not None:
            tokens = [None]  # its end was logged by itself
        scores: list[Scores | None] = [None] * len(tokens)
        if self._with_scores and piece.token_ids:
            scores = [*self._answer.scores(0, self._done, piece.count)]
        frames = []
        for token, score in zip(tokens, scores, strict=True):
            self._done += token is not None
            ending = piece.ending if self._done == piece.count else None
            place = self.place(piece, self._done)
            frames.append(place + _event(self._token(token, score, ending)))
        return b"".join(frames)

    def end(self) -> bytes:
        """Nothing: the last token says that it is the last."""
        return b""

    def failure(self, error: ServingError) -> bytes:
        """An event with the error."""
        return b"data:" + error_body(error) + b"\n\n"

    def _token(self, token: int | None, score: Scores | None, ending: Ending | None) -> Any:
        assert self._texts is not None
        text = "" if token is None else self._texts.push(token)
        if ending is not None:
            text += self._texts.end()
        entry = token_entry(self._texts, 0 if token is None else token, text, score)
        if token is None:
            entry["special"] = True
        content: dict[str, Any] = {"index": max(self._done, 1), "token": entry}
        if score is not None and self._answer.head.sampling.logprobs:
            content["top_tokens"] = top_entries(self._texts, score)
        content |= {"generated_text": None, "details": None}
        if ending is not None:
            reply = self._answer.head.reply
            content["generated_text"] = reply.prompt_text + self._answer.text(0)
            content["details"] = summary(self._answer, ending, self._done)
        return content


def whole(answer: Answer, outcome: Outcome) -> Iterator[str]:
    """The reply to a request that is not streamed, as JSON in pieces; with details where log-probabilities are."""
    text = answer.head.reply.prompt_text + outcome.text
    yield f'{{"generated_text":{encode_basestring(text)}'
    if answer.head.sampling.HasField("logprobs"):
        yield f',"details":{compact(summary(answer, outcome.ending, outcome.tokens))[:-1]}'
        yield ',"prefill":['
        yield from _listed(_prompt_entries(answer))
        yield '],"tokens":['
        yield from _listed(_token_entries(answer))
        if answer.head.sampling.logprobs:
            yield '],"top_tokens":['
            texts = TokenTexts(answer, 0)
            yield from _listed(top_entries(texts, score) for score in _scores(answer))
        yield "]}"
    yield "}"


def summary(answer: Answer, ending: Ending, tokens: int) -> dict[str, Any]:
    """What is said of an answer as a whole."""
    sampling = answer.head.sampling
    return {
        "finish_reason": end_name(ending),
        "generated_tokens": tokens,
        "seed": sampling.seed if sampling.temperature > 0 else None,
        "input_length": answer.prompt_tokens,
    }


def token_entry(texts: TokenTexts, token: int, text: str, score: Scores | None) -> dict[str, Any]:
    """A token as TGI lists it; its log-probability is None where it was not asked for."""
    logprob = None if score is None else max(score[0], -9999.0)
    return {"id": token, "text": text, "logprob": logprob, "special": texts.is_special(token)}


def top_entries(texts: TokenTexts, score: Scores) -> list[dict[str, Any]]:
    """The likeliest tokens in the place of one."""
    return [token_entry(texts, token, texts.name(token), (value, [])) for token, value in score[1]]


def _scores(answer: Answer) -> Iterator[Scores]:
    """Those of all tokens, read in slices."""
    count = len(answer.token_ids(0))
    for start in range(0, count, _SLICE):
        yield from answer.scores(0, start, min(start + _SLICE, count))


def _token_entries(answer: Answer) -> Iterator[dict[str, Any]]:
    texts, tokens = TokenTexts(answer, 0), answer.token_ids(0)
    for index, (token, score) in enumerate(zip(tokens, _scores(answer), strict=True), 1):
        text = texts.push(token)
        yield token_entry(texts, token, text + texts.end() if index == len(tokens) else text, score)


def _prompt_entries(answer: Answer) -> Iterator[dict[str, Any]]:
    """The prompt's tokens, the first without a log-probability; none unless they were asked for."""
    if not answer.head.sampling.HasField("prompt_logprobs"):
        return
    assert answer.prompt_ids is not None and answer.prompt_scores is not None
    texts = TokenTexts(answer, 0)
    own = [None, *(max(score[0], -9999.0) for score in answer.prompt_scores)]
    for token, logprob in zip(answer.prompt_ids, own, strict=True):
        yield {"id": token, "text": texts.name(token), "logprob": logprob}


def _listed(entries: Iterator[Any]) -> Iterator[str]:
    for index, entry in enumerate(entries):
        yield f"{',' if index else ''}{compact(entry)}"


def _event(content: Any) -> bytes:
    return f"data:{compact(content)}\n\n".encode()
