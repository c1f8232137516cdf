"""From the events of a stream to outputs that have all that has come so far."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from services.launcher.offline.outputs import (
    CompletionOutput,
    Logprob,
    Logprobs,
    RequestMetrics,
    RequestOutput,
)

_NAME = "token_id:"  # before the ids of tokens in log-probabilities
ABORTED = "abort"

TextOf = Callable[[int], str | None]


class AnswerFold:
    """One request. Events are those of completions and chats with token ids, log-probabilities by token ids."""

    def __init__(
        self, request_id: str, prompt: str | None, choices: int, top: int, text_of: TextOf
    ) -> None:
        """`top`: how many of the likeliest tokens log-probabilities have; `text_of` a token is its text."""
        self._request_id, self._prompt = request_id, prompt
        self._choices = [_Choice(index, top, text_of) for index in range(choices)]
        self._prompt_ids: Sequence[int] = ()
        self._prompt_logprobs: Sequence[Logprobs | None] | None = None
        self._cached: int | None = None
        self._metrics = RequestMetrics(time.time())

    @property
    def has_ended(self) -> bool:
        """Whether all choices have."""
        return all(choice.finish_reason is not None for choice in self._choices)

    def add(self, event: Mapping[str, Any]) -> bool:
        """Takes in an event; whether it adds to an answer."""
        self._note_prompt(event)
        if usage := event.get("usage"):
            self._cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        adds = False
        for content in event.get("choices", ()):
            self._note_prompt(content)
            adds |= self._choices[content["index"]].add(content)
        if adds:
            self._metrics.last_token_time = now = time.time()
            self._metrics.first_token_time = self._metrics.first_token_time or now
        return adds

    def abort(self) -> None:
        """Ends the choices that have not ended."""
        for choice in self._choices:
            choice.finish_reason = choice.finish_reason or ABORTED

    def output(self, *, finished: bool) -> RequestOutput:
        """All that has come so far."""
        if finished:
            self._metrics.finished_time = time.time()
        return RequestOutput(
            self._request_id,
            self._prompt,
            self._prompt_ids,
            [choice.output() for choice in self._choices],
            finished,
            self._prompt_logprobs,
            self._metrics,
            self._cached,
        )

    def _note_prompt(self, content: Mapping[str, Any]) -> None:
        """What is said of the prompt, in a choice of completions and beside those of chats."""
        self._prompt_ids = content.get("prompt_token_ids") or self._prompt_ids
        scores = content.get("prompt_logprobs")
        if scores is not None:
            self._prompt_logprobs = [one and _of_prompt(one) for one in scores]


class _Choice:
    """One answer, growing."""

    def __init__(self, index: int, top: int, text_of: TextOf) -> None:
        self._index, self._top, self._text_of = index, top, text_of
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[Logprobs] | None = None
        self._sum = 0.0
        self.finish_reason: str | None = None
        self._stop_reason: int | str | None = None

    def add(self, content: Mapping[str, Any]) -> bool:
        """Takes in a choice of an event; whether it adds anything."""
        message = content.get("delta") or content.get("message") or {}
        text = content.get("text") or message.get("content") or ""
        ids = content.get("token_ids") or ()
        if text:
            self._texts.append(text)
        self._token_ids += ids
        if scores := content.get("logprobs"):
            self._add_logprobs(scores)
        if content.get("finish_reason") is not None:
            self.finish_reason = content["finish_reason"]
            self._stop_reason = content.get("stop_reason")
        return bool(text or ids or self.finish_reason)

    def output(self) -> CompletionOutput:
        """All of it so far."""
        return CompletionOutput(
            self._index,
            "".join(self._texts),
            tuple(self._token_ids),
            None if self._logprobs is None else self._sum,
            None if self._logprobs is None else tuple(self._logprobs),
            self.finish_reason,
            self._stop_reason,
        )

    def _add_logprobs(self, scores: Mapping[str, Any]) -> None:
        entries = self._logprobs = [] if self._logprobs is None else self._logprobs
        if "content" in scores:  # a chat's
            for own in scores["content"] or ():
                self._sum += own["logprob"]
                ranked = [_of_chat(one, rank) for rank, one in enumerate(own["top_logprobs"], 1)]
                entries.append({**dict([_of_chat(own, None)]), **dict(ranked)})
            return
        for value, top in zip(scores["token_logprobs"], scores["top_logprobs"], strict=True):
            self._sum += value
            # The likeliest in order, and behind them the token itself where it is none of them.
            entry = {}
            for rank, (name, likely) in enumerate(top.items(), 1):
                place = rank if rank <= self._top else None
                entry[_id(name)] = Logprob(likely, place, self._text_of(_id(name)))
            entries.append(entry)


def _of_chat(entry: Mapping[str, Any], rank: int | None) -> tuple[int, Logprob]:
    text = bytes(entry["bytes"] or ()).decode("utf-8", "replace")
    return _id(entry["token"]), Logprob(entry["logprob"], rank, text)


def _of_prompt(entry: Mapping[str, Any]) -> Logprobs:
    return {
        int(token): Logprob(one["logprob"], one["rank"], one["decoded_token"])
        for token, one in entry.items()
    }


def _id(name: str) -> int:
    return int(name.removeprefix(_NAME))
