"""What requests give. Names are those of vLLM's offline API."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

_O = TypeVar("_O")


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely a token was; `rank` counts from 1, None for a token that is not among the likeliest asked for."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# By token id.
Logprobs = Mapping[int, Logprob]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer, as far as it has come."""

    index: int
    text: str
    token_ids: Sequence[int]
    # Of the tokens so far; None without `logprobs`.
    cumulative_logprob: float | None = None
    logprobs: Sequence[Logprobs] | None = None
    # "stop", "length" or "abort"; None while it goes on.
    finish_reason: str | None = None
    # The stop text or stop id that ended it.
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The vector of one prompt."""

    embedding: Sequence[float]

    @property
    def hidden_size(self) -> int:
        """How many numbers it has."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """The classes of one prompt: how likely each is, and the name of the likeliest."""

    probs: Sequence[float]
    label: str

    @property
    def num_classes(self) -> int:
        """How many there are."""
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """How well a text answers a query."""

    score: float


@dataclass(frozen=True, slots=True)
class PooledOutput(Generic[_O]):
    """What a prompt became that no text was generated for."""

    request_id: str
    outputs: _O
    finished: bool = True


@dataclass(slots=True)
class RequestMetrics:
    """When things happened, in seconds since the epoch; None is not yet."""

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request and its answers. Of a stream each has all that has come so far."""

    request_id: str
    # The text that was given; None for token ids and conversations.
    prompt: str | None
    # With the placeholders of media; empty until the prompt is prepared.
    prompt_token_ids: Sequence[int]
    outputs: Sequence[CompletionOutput]
    finished: bool
    # For each token of the prompt, None for the first; where `prompt_logprobs` asks for them.
    prompt_logprobs: Sequence[Logprobs | None] | None = None
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(0.0))
    # Prompt tokens whose computation was found in a cache; known at the end.
    num_cached_tokens: int | None = None
