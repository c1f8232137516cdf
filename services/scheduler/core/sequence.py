"""One choice of one request, as the core sees it, and in which order such sequences take part in steps."""

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

from services.scheduler.core.beams import BeamSearch

# How many tokens a sequence generates before the blocks that they fill are named: nobody is likely to ask for an answer
# that is being written, and when it has been written all of them are named.
_TOKENS_PER_LOOK = 64


class SequenceStatus(Enum):
    """Where a sequence is."""

    PENDING = "pending"  # to be forked from a sibling when that one's prompt is computed
    WAITING = "waiting"  # holds no blocks on the device: new, or preempted
    RUNNING = "running"  # holds blocks
    ENDED = "ended"  # logged or about to be; results that still come for it are dropped


class EndReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


INVALID_ARGUMENT, INTERNAL = 3, 13  # numbers of gRPC


class Error(NamedTuple):
    """What went wrong: a word for programs, a sentence for people, the gRPC status that says whose fault it is, and the
    field of the request that it is about, if it is about one.
    """

    reason: str
    message: str
    code: int = INTERNAL
    field: str = ""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a sequence ended: `cut` is the number of bytes to remove from the text, `error` what went wrong."""

    reason: EndReason
    stop: str = ""
    cut: int = 0
    stop_token_id: int | None = None
    error: Error | None = None


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

    `tokens` are the prompt and every *committed* output token. `num_tokens` also counts samples that were planned and
    not yet answered: their ids are known to the decoder alone, so hashes do without them.

    `plain_until` and `watch_from` keep the steady state cheap: below them planning the next token and committing it
    are a few additions; blocks, hashes and endings are looked at only when one of them is reached.
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
    lora_folder: str = ""  # where a decoder finds its adapter; empty where it is not known
    cache_salt: bytes = b""
    content: bytes = b""  # digest of the weights that compute it; empty where it is not known
    priority: int = 0  # lower goes first, under the policy of that name
    arrival: int = 0
    isolated_until: int = 0  # while it has fewer tokens, no other request computes in its steps
    # Top log-probabilities that the decoder reports for each token; -1: none.
    num_logprobs: int = -1
    # Something is made of every token of its prompt: all of it must be computed, in order.
    reads_prompt: bool = False
    # Its tokens are not simply those with the largest logits: choosing them may read the whole output matrix.
    reads_logits: bool = False
    # Numbers of the vector that its prompt becomes; 0: it generates tokens.
    pooled_width: int = 0
    # Chooses its tokens; what the decoder samples is then ignored.
    beams: "BeamSearch[Sequence] | None" = None
    payload: Any = None  # what the servicer keeps with it; never read here

    status: SequenceStatus = SequenceStatus.WAITING
    ended: bool = False
    is_special: bool = field(init=False)  # what the decoder samples is not simply its next token
    slot: int = -1
    forks: list["Sequence"] = field(default_factory=list)  # siblings that are pending
    blocks: list[int] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)  # those of its blocks while swapped out
    block_hashes: list[bytes] = field(default_factory=list)
    num_tokens: int = field(init=False)  # tokens that exist, those in flight included
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # found in the prefix cache when it was first admitted
    num_registered: int = 0  # leading blocks that are in the prefix cache
    num_sealed: int = 0  # leading blocks whose content the decoder has been told to keep
    num_media_passed: int = 0  # leading media items that it is computed past
    num_preemptions: int = 0  # how often it had to wait again
    generation: int = 0  # how often it has lost its blocks: rows planned before say nothing about the present ones
    was_recomputed: bool = False  # what it had lost was computed again after its first token
    plain_until: int = 0  # a row of one token that starts below needs no block and is not the last
    watch_from: int = 0  # commits that make it this long, or longer, need a look
    # Drafts that the decoder may put into its next row, and may have put into rows that were not answered yet: by so
    # many tokens it may be longer than `num_tokens`, and computed further than `num_computed_tokens`.
    num_drafts: int = 0
    slack: int = 0
    acceptance: float = -1.0  # share of its latest drafts that were right; -1: it had none
    drafts_run: int = 0
    drafts_right: int = 0
    misses: int = 0  # rows in a row that could have drafts, and for which there were none
    asked_from: int = 0  # the step from which on there may be some again, after several misses
    # With so many tokens it gets a draft, though those before did not pay, and the next one after so many more.
    probe_from: int = 0
    probe_after: int = 0

    def __post_init__(self) -> None:
        self.num_tokens = len(self.tokens)
        self.is_special = self.beams is not None

    @property
    def in_flight(self) -> int:
        """Samples that were planned and not yet answered."""
        return self.num_tokens - len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        """Committed output tokens."""
        return len(self.tokens) - self.prompt_len

    @property
    def output(self) -> Tokens[int]:
        """Committed output tokens."""
        return self.tokens[self.prompt_len :]

    @property
    def length_limit(self) -> int:
        """Prompt and output tokens at most."""
        return self.prompt_len + self.max_tokens

    @property
    def is_certainly_last(self) -> bool:
        """The token in flight is the last that it may have: planning on would only be thrown away."""
        return self.num_tokens >= self.prompt_len + self.max_tokens

    def fork(self, choice: int) -> "Sequence":
        """A sequence that has got exactly as far, without blocks or a slot."""
        return Sequence(
            self.request_id,
            list(self.tokens),
            self.prompt_len,
            self.max_tokens,
            choice=choice,
            stop_token_ids=self.stop_token_ids,
            min_tokens=self.min_tokens,
            media=self.media,
            lora_id=self.lora_id,
            lora_folder=self.lora_folder,
            cache_salt=self.cache_salt,
            content=self.content,
            priority=self.priority,
            arrival=self.arrival,
            isolated_until=self.isolated_until,
            num_logprobs=self.num_logprobs,
            reads_logits=self.reads_logits,
            beams=self.beams,
            payload=self.payload,
            block_hashes=list(self.block_hashes),
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
            was_recomputed=self.was_recomputed,
        )

    def refuse(self) -> None:
        """It ends without having been scheduled."""
        self.status = SequenceStatus.ENDED
        self.ended = True

    def ending_after(self, token: int) -> Ending | None:
        """Whether the token that was just appended is its last. To be asked once for every token that needs a look."""
        generated = self.num_output_tokens
        # Before min_tokens none comes but where a grammar leaves nothing else.
        if token in self.stop_token_ids:
            return Ending(EndReason.STOP, stop_token_id=token)
        found = self.stop_search.push(token) if self.stop_search is not None else None
        if found is not None and generated >= self.min_tokens:
            return Ending(EndReason.STOP, stop=found.stop, cut=found.cut_bytes)
        if generated >= self.max_tokens:
            return Ending(EndReason.LENGTH)
        return None

    def set_watch(self, block_size: int) -> None:
        """Puts `watch_from` at the next commit that fills blocks or may end it; at once where text is searched."""
        if self.stop_search is not None:
            self.watch_from = 0
            return
        several = -(-_TOKENS_PER_LOOK // block_size) * block_size
        # A block is full of computed tokens one commit after its last token.
        border = (len(self.tokens) - 1) // several * several + several + 1
        self.watch_from = min(border, self.length_limit)


Policy = Callable[[Sequence], tuple[int, ...]]
"""Rank of a sequence: the lowest is admitted first, the highest is preempted first."""


def first_come_first_served(sequence: Sequence) -> tuple[int, ...]:
    """By arrival at the queue: a request that comes back from a lost decoder keeps its place."""
    return (sequence.arrival, sequence.choice)


def by_priority(sequence: Sequence) -> tuple[int, ...]:
    """By priority, lower first, and by arrival among equals."""
    return (sequence.priority, sequence.arrival, sequence.choice)


POLICIES: dict[str, Policy] = {"fcfs": first_come_first_served, "priority": by_priority}


class Isolation:
    """Which sequences may share a step: nearly always all.

    A sequence that is suspected of crashing decoders is isolated until it has `isolated_until` tokens. The requests of
    isolated sequences and all other requests together then take turns, one plan in flight at a time, so that it is
    known whose plan was not answered.
    """

    def __init__(self) -> None:
        self.first: Sequence | None = None  # of the isolated sequences, by rank
        self._isolated: dict[Sequence, None] = {}
        self._requests: dict[str, None] = {}  # with isolated sequences, by rank
        self._request: str | None = None  # whose turn it is; None is the turn of all others

    def add(self, sequence: Sequence) -> None:
        """A new sequence."""
        if len(sequence.tokens) < sequence.isolated_until:
            self._isolated[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        self._isolated.pop(sequence, None)

    @property
    def is_turn_of_others(self) -> bool:
        """Whether it is the turn of the requests that are not isolated."""
        return self._request is None

    def is_active(self) -> bool:
        """Whether turns are taken: then a plan waits for the answer to the one before it."""
        if self._isolated:  # nearly never
            self._isolated = {s: None for s in self._isolated if len(s.tokens) < s.isolated_until}
        return bool(self._isolated) or self._request is not None

    def turns(self, policy: Policy) -> Iterator[None]:
        """Gives the turn to one after the other, as long as the caller finds nothing to compute."""
        if not self._isolated:
            self.first, self._requests, self._request = None, {}, None
            yield
            return
        by_rank = sorted(self._isolated, key=policy)
        self.first = by_rank[0]
        self._requests = dict.fromkeys(s.request_id for s in by_rank)
        turns: list[str | None] = [None, *self._requests]
        # From the one after the last turn on: a request that is isolated for long does not keep others waiting.
        next_ = turns.index(self._request) + 1 if self._request in turns else 0
        for self._request in turns[next_:] + turns[:next_]:
            yield

    def select(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Those whose turn it is."""
        if not self._requests:
            return list(sequences)
        if self._request is not None:
            return [s for s in sequences if s.request_id == self._request]
        return [s for s in sequences if s.request_id not in self._requests]
