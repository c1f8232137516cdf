"""How to generate. Names, defaults and checks are those of vLLM's `SamplingParams`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

# Of requests without parameters.
DEFAULT_MAX_TOKENS = 16


@dataclass(kw_only=True)
class SamplingParams:
    """docs/api.md says what each does. Raises ValueError naming the field; what depends on the model is checked when it
    is used.
    """

    n: int = 1
    # Candidates, of which the n best are given.
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    # 0 and -1 are off.
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    # None is what the model's length leaves.
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    # Likeliest tokens for each token of the answer, and of the prompt; 0 is its own alone, None is none.
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    # The form of the answer: one of json, regex, choice, grammar, json_object, structural_tag.
    structured_outputs: Mapping[str, Any] | None = None
    # Beam search with best_of beams; temperature, top_p and top_k have no effect on it.
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        _at_least("n", self.n, 1)
        if self.best_of is not None:
            _at_least("best_of", self.best_of, self.n)
        for name in ("presence_penalty", "frequency_penalty"):
            _within(name, getattr(self, name), -2.0, 2.0)
        _above("repetition_penalty", self.repetition_penalty, 0.0)
        _within("temperature", self.temperature, 0.0, 2.0)
        _above("top_p", self.top_p, 0.0)
        _within("top_p", self.top_p, 0.0, 1.0)
        _within("min_p", self.min_p, 0.0, 1.0)
        _at_least("top_k", self.top_k, -1)
        if self.max_tokens is not None:
            _at_least("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                raise ValueError(
                    f"min_tokens must not be above max_tokens={self.max_tokens}, not {self.min_tokens}"
                )
        _at_least("min_tokens", self.min_tokens, 0)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 0)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError(
                "allowed_token_ids must hold at least one id: leave it out to allow all"
            )
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        if "" in stops:
            raise ValueError("stop must not hold an empty string")

    @property
    def is_chosen_at_end(self) -> bool:
        """Whether answers are the best of several, which are known when all have ended."""
        return self.use_beam_search or (self.best_of or self.n) > self.n

    def fields(self, *, is_chat: bool) -> dict[str, Any]:
        """The fields of a request's body. All are said, so that no default of the model takes their place, but for
        what a chat and a completion call differently, and what is off.
        """
        body = {one.name: getattr(self, one.name) for one in fields(self)}
        if self.logit_bias is not None:
            body["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        if is_chat and self.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": self.logprobs}
        if self.use_beam_search:
            for name in ("temperature", "top_p", "top_k", "min_p"):
                del body[name]
        return {name: value for name, value in body.items() if value is not None}


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ValueError(f"{name} must be at least {low}, not {value}")


def _above(name: str, value: float, low: float) -> None:
    if not value > low:
        raise ValueError(f"{name} must be above {low:g}, not {value}")


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} must be between {low:g} and {high:g}, not {value}")
