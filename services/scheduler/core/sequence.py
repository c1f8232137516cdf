"""One choice of one request, as the core sees it."""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol


class SequenceStatus(Enum):
    """Where a sequence is."""

    WAITING = "waiting"  # holds no blocks: new, or preempted
    RUNNING = "running"  # holds blocks
    ENDED = "ended"  # logged or about to be; results that still come for it are dropped


class EndReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Ending:
    """How a sequence ended: `cut` is the number of bytes to remove from the text, `error` what went wrong."""

    reason: EndReason
    stop: str = ""
    cut: int = 0
    stop_token_id: int | None = None
    error: tuple[str, str] | None = None


class Stop(Protocol):
    """A stop string that was found."""

    @property
    def stop(self) -> str: ...
    @property
    def cut_bytes(self) -> int: ...


class StopSearch(Protocol):
    """Searches the output for stop strings, a token at a time; state of its own for each sequence."""

    def push(self, token_id: int, /) -> Stop | None: ...


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Where one media item stands in the prompt, and what names its embeddings."""

    digest: bytes
    offset: int
    length: int
    rows: int
    payload: Any = None  # what the servicer needs to have it encoded; never read here

    @property
    def end(self) -> int:
        """Index after the last token of the span."""
        return self.offset + self.length


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, how far they are computed, and the blocks that hold them.

    `tokens` are the prompt and every *committed* output token. `in_flight` counts samples that were planned and not
    yet answered: their ids are known to the decoder alone, so `num_tokens` counts them and hashes do not.
    """

    request_id: str
    tokens: list[int]
    prompt_len: int
    max_tokens: int
    choice: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    stop_search: StopSearch | None = None
    media: tuple[MediaSpan, ...] = ()
    lora_id: str = ""
    cache_salt: bytes = b""
    priority: int = 0
    arrival: int = 0
    payload: Any = None  # what the servicer needs to introduce it to a decoder; never read here

    status: SequenceStatus = SequenceStatus.WAITING
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_completed_tokens: int = 0  # computed in steps whose result has arrived
    num_cached_tokens: int = 0  # found in the prefix cache when it was first admitted
    num_registered: int = 0  # leading blocks that are in the prefix cache
    num_sealed: int = 0  # leading blocks whose content the decoder has been told to keep
    num_media_passed: int = 0  # leading media items that it is computed past
    in_flight: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that exist, those in flight included."""
        return len(self.tokens) + self.in_flight

    @property
    def num_output_tokens(self) -> int:
        """Committed output tokens."""
        return len(self.tokens) - self.prompt_len

    @property
    def output(self) -> Tokens[int]:
        """Committed output tokens."""
        return self.tokens[self.prompt_len :]

    @property
    def is_certainly_last(self) -> bool:
        """The token in flight is the last that it may have: planning on would only be thrown away."""
        return self.num_tokens - self.prompt_len >= self.max_tokens

    def commit(self, token: int) -> Ending | None:
        """Takes a sampled token as its next one and says whether it ends here."""
        self.tokens.append(token)
        generated = self.num_output_tokens
        if token in self.stop_token_ids and generated >= self.min_tokens:
            return Ending(EndReason.STOP, stop_token_id=token)
        found = self.stop_search.push(token) if self.stop_search is not None else None
        if found is not None and generated >= self.min_tokens:
            return Ending(EndReason.STOP, stop=found.stop, cut=found.cut_bytes)
        if generated >= self.max_tokens:
            return Ending(EndReason.LENGTH)
        return None
