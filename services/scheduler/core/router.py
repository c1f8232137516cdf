"""Which decoder a sequence goes to: the one that will give its first token earliest.

A router knows the cores of its decoders, in the same process: what waits there and what is cached is read, not polled.
Several schedulers do not know of each other; between them the queue decides, by who takes a request.
"""

import itertools
import random
from typing import Generic, Protocol, TypeVar

from services.scheduler.core.blocks import extend_hashes
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence import Sequence

_LOOK_AT_ALL = 8  # so few decoders are all looked at
_HOLDERS = 2  # else the last that got the prefix
_AT_RANDOM = 3  # and some others
# What it costs to send a sequence somewhere, counted in tokens to compute. Found by simulation (benchmarks/README.md):
# cached prefixes pull sequences together, and these push them apart.
# A token that must be computed delays the sequence itself and those that come after it: it counts for more than one, or
# a burst with one new prefix would compute it on as many decoders as there are.
_OWN_TOKEN = 1.5
# It also delays every sequence that is there already, by as much each; but a late token is less bad than a first one.
_OWN_TOKEN_FOR_ANOTHER = 0.1
# A sequence that is there already takes a row in the steps to come, and the new one takes a row in the steps of it.
_TOKENS_PER_SEQUENCE = 128
# What waiting for a slot costs, for each sequence that must end before: far more than one that is there.
_TOKENS_PER_SLOT = 512
# Of the blocks of a cache, one in several is at a depth that the index knows, and it keeps two generations.
_BLOCKS_PER_ENTRY = 4
_NEVER = 1e9  # seconds: a draining decoder is taken only if all are draining
_MOST_HOLDERS = 8  # that are remembered of a prefix
_REFRESH_STEPS = 64  # between looks at a decoder's fitted rate


class HasCore(Protocol):
    """Something that runs sequences by a `Scheduler`."""

    core: Scheduler

    @property
    def numerics(self) -> str:
        """What its bits depend on."""

    @property
    def draining(self) -> bool:
        """It gets no new sequences while others can take them."""

    def predict(self, tokens: int, /) -> float:
        """Seconds that a step of so many tokens takes there; 0 as long as nothing is known of it."""


Link = TypeVar("Link", bound=HasCore)
Holder = TypeVar("Holder")


class PrefixIndex(Generic[Holder]):
    """The last few holders of each prefix of 1, 2, 4, 8... blocks: most other lengths are never asked for.

    Bounded: of two generations the older one is forgotten when the younger is full; what is asked for moves to the
    younger one. An entry is a hint, since the holder's cache may have lost the prefix.
    """

    def __init__(self, capacity: int = 1024) -> None:
        self.capacity = capacity  # entries of a generation
        self._young: dict[bytes, tuple[Holder, ...]] = {}
        self._old: dict[bytes, tuple[Holder, ...]] = {}

    def find(self, hashes: list[bytes]) -> tuple[tuple[Holder, ...], int]:
        """Holders of the longest prefix that is known, the latest last, and its blocks; no one and 0 if none is."""
        depth = 1 << len(hashes).bit_length() >> 1
        while depth:
            content = hashes[depth - 1]
            holders = self._young.get(content) or self._old.get(content)
            if holders:
                return holders, depth
            depth >>= 1
        return (), 0

    def add(self, hashes: list[bytes], holder: Holder) -> None:
        """A sequence with these blocks was sent to a holder."""
        young, old = self._young, self._old
        depth, last = 1, len(hashes)
        while depth <= last:
            content = hashes[depth - 1]
            holders = young.get(content)
            if holders is None:
                holders = young[content] = old.get(content, ())
            if not holders or holders[-1] != holder:
                others = [other for other in holders if other != holder]
                young[content] = (*others[1 - _MOST_HOLDERS :], holder)
            depth <<= 1
        if len(young) > self.capacity:
            self._old, self._young = young, {}


class Router(Generic[Link]):
    """The decoders in service, and the choice of one for each sequence.

    The cost of a decoder is the time until the sequence is computed there: what waits before it and its own tokens
    less those that are cached. A decoder that holds the prefix is passed over as soon as its line is longer than
    another's by more than the prefix saves; then that one holds the prefix too, so that no line grows without bound.

    Looked at are the last holders of the longest known prefix and a few decoders at random (two choices suffice to
    keep lines even: Mitzenmacher 2001), so that a decision among a thousand decoders costs no more than among ten.
    """

    def __init__(self) -> None:
        self._lines: list[_Line[Link]] = []
        self._by_number: dict[int, _Line[Link]] = {}
        # Of the numbers of lines: an entry outlives the decoder that it names.
        self._index: PrefixIndex[int] = PrefixIndex(capacity=0)
        self._numbers = itertools.count()
        self._shortest = 0  # tokens of one sequence that every decoder holds
        self._usual = 1.0  # seconds for each token where nothing is known of a decoder
        # Of a fixed seed, so that a simulation can be repeated.
        self._chance = random.Random(0).random

    def add(self, link: Link) -> None:
        """A decoder came into service."""
        line = _Line(link, next(self._numbers))
        self._lines.append(line)
        self._by_number[line.number] = line
        self._index.capacity += link.core.state.blocks.num_total // _BLOCKS_PER_ENTRY
        self._look_at_lengths()

    def remove(self, link: Link) -> None:
        """A decoder left, its cache with it; nothing if it is not in service."""
        for line in self._lines:
            if line.link is link:
                del self._by_number[line.number]
                self._index.capacity -= link.core.state.blocks.num_total // _BLOCKS_PER_ENTRY
        self._lines = list(self._by_number.values())
        self._look_at_lengths()

    def choose(self, sequence: Sequence, begun_in: str | None = None) -> Link:
        """The decoder that the caller now adds the sequence to; one that holds it to its end, if there is any. There
        must be one in service. begun_in: the numerics of what was logged of it before; one where they are equal takes
        it unless it would have to wait there for others to end, and elsewhere it would not."""
        capacity = self._lines[0].link.core.capacity
        block_size = capacity.block_size
        extend_hashes(sequence, capacity)
        # The last token must always be computed: a block that ends with it saves nothing.
        hashes = sequence.block_hashes[: (len(sequence.tokens) - 1) // block_size]
        holders, depth = self._index.find(hashes)
        lines = self._that_hold(sequence)
        if begun_in is not None:
            lines = _preferred(lines, sequence, begun_in)
        best = lines[0]
        least, most_cached = float("inf"), 0
        for line, cached in self._compared(lines, holders, hashes, depth):
            tokens = len(sequence.tokens) - cached * block_size
            cost = line.seconds_to_wait(tokens, self._usual)
            if cost < least:
                best, least, most_cached = line, cost, cached
        self._usual = best.token_s or self._usual
        best.join(sequence, most_cached * block_size)
        self._index.add(hashes, best.number)
        return best.link

    def _look_at_lengths(self) -> None:
        lengths = (line.link.core.capacity.max_tokens_of_one for line in self._lines)
        self._shortest = min(lengths, default=0)

    def _that_hold(self, sequence: Sequence) -> "list[_Line[Link]]":
        """The decoders that it fits into; all if there is none."""
        if sequence.length_limit <= self._shortest and not sequence.lora_id:
            return self._lines
        fitting = [line for line in self._lines if line.holds(sequence)]
        if not fitting:
            return [line for line in self._lines if line.can_have_adapter(sequence)] or self._lines
        with_adapter = [line for line in fitting if line.has_adapter(sequence)]
        # Elsewhere it is read first, which is worth it where it would have to wait otherwise.
        if any(line.has_room(sequence) for line in with_adapter):
            return with_adapter
        return fitting

    def _compared(
        self,
        lines: "list[_Line[Link]]",
        holders: tuple[int, ...],
        hashes: list[bytes],
        depth: int,
    ) -> "list[tuple[_Line[Link], int]]":
        """Decoders to compare, each with the blocks that are cached there."""
        count = len(lines)
        if count <= _LOOK_AT_ALL:
            return [(line, line.cached_blocks(hashes, depth)) for line in lines]
        chosen = [
            (line, line.cached_blocks(hashes, depth))
            for line in map(self._by_number.get, holders[-_HOLDERS:])
            if line is not None and (lines is self._lines or line in lines)
        ]
        for _ in range(_AT_RANDOM):
            line = lines[int(self._chance() * count)]
            chosen.append((line, depth if depth and line.blocks.has(hashes[depth - 1]) else 0))
        return chosen


def _preferred(
    lines: "list[_Line[Link]]", sequence: Sequence, begun_in: str
) -> "list[_Line[Link]]":
    same = [line for line in lines if line.link.numerics == begun_in and not line.link.draining]
    with_room = [line for line in same if line.has_room(sequence)]
    if with_room or not same:
        return with_room or lines
    return lines if any(line.has_room(sequence) for line in lines) else same


class _Line(Generic[Link]):
    """A decoder, and the sequences that were sent there and are not yet computed."""

    def __init__(self, link: Link, number: int) -> None:
        self.link = link
        self.number = number  # unique in its router
        self.step_s = 0.0  # time of a step of one token
        self.token_s = 0.0  # and of each further one; both 0 while unknown
        self.blocks = link.core.state.blocks
        self._state = link.core.state
        self._capacity = link.core.capacity
        self._pending: list[tuple[Sequence, int]] = []  # with the tokens that were cached for it
        self._tokens = 0  # to compute for them, as of the last look
        self._look_at = 0  # the step from which on it is worth looking again
        self._refresh_at = 0

    def holds(self, sequence: Sequence) -> bool:
        """Whether a sequence can run here to its end."""
        return self._capacity.holds(sequence)

    def can_have_adapter(self, sequence: Sequence) -> bool:
        """Whether its adapter, if it has one, is here or can be loaded."""
        return self._capacity.has_adapter(sequence)

    def has_adapter(self, sequence: Sequence) -> bool:
        """Whether its adapter, if it has one, is here now."""
        return self._state.adapters.has(sequence.lora_id)

    def has_room(self, sequence: Sequence) -> bool:
        """Whether a sequence can begin here before others have ended."""
        if self.link.draining or self._state.num_sequences >= self._capacity.max_slots:
            return False
        waiting = self._tokens + len(sequence.tokens)
        return waiting <= self.blocks.num_free * self._capacity.block_size

    def join(self, sequence: Sequence, cached: int) -> None:
        """A sequence was sent here; `cached` of its tokens need not be computed."""
        self._pending.append((sequence, cached))
        self._tokens += len(sequence.tokens) - cached

    def cached_blocks(self, hashes: list[bytes], depth: int) -> int:
        """Leading blocks that are cached here, or will be; `depth` of them are known to have been sent somewhere.

        Only what follows the known ones is looked up one by one: a cache loses the ends of its chains first.
        """
        find = self.blocks.find
        if depth <= 1:
            return len(find(hashes))
        found = len(find(hashes[depth - 1 :]))
        if found:
            return depth - 1 + found
        # What is yet to be computed here counts too: sequences with one new prefix that come together stay together.
        for sequence, _ in self._pending:
            known = sequence.block_hashes
            if len(known) >= depth and known[depth - 1] == hashes[depth - 1]:
                return depth + _num_equal(known[depth:], hashes[depth:])
        return len(find(hashes[: depth - 1]))

    def seconds_to_wait(self, tokens: int, usual: float) -> float:
        """What a sequence with so many tokens to compute would wait for here, and others for it. `usual` is the time of
        a token where nothing is known of it."""
        state, capacity = self._state, self._capacity
        present, step = state.num_sequences, state.steps
        if step >= self._look_at or present < len(self._pending):
            self._look(step)
        weight = _OWN_TOKEN + present * _OWN_TOKEN_FOR_ANOTHER
        total = self._tokens + weight * tokens + present * _TOKENS_PER_SEQUENCE
        missing_slots = present + 1 - capacity.max_slots
        if missing_slots > 0:
            total += missing_slots * _TOKENS_PER_SLOT
        missing_tokens = self._tokens + tokens - self.blocks.num_free * capacity.block_size
        if missing_tokens > 0:  # they must be given up by others first
            total += missing_tokens
        seconds = total * (self.token_s or usual)
        if state.in_flight:  # a step is running, half of it still to come in the mean
            seconds += self.step_s / 2
        return seconds + _NEVER if self.link.draining else seconds

    def _look(self, step: int) -> None:
        """Forgets sequences that are computed. A long line is looked at less often: its sum changes less."""
        if self._pending:
            pending, self._pending, self._tokens = self._pending, [], 0
            for entry in pending:
                sequence, cached = entry
                computed = sequence.num_computed_tokens
                if computed < sequence.prompt_len and not sequence.ended:
                    self._pending.append(entry)
                    self._tokens += len(sequence.tokens) - max(cached, computed)
        self._look_at = step + 1 + len(self._pending) // 8
        if step >= self._refresh_at or not self.token_s:
            full = self._capacity.max_batched_tokens
            self.step_s, most = self.link.predict(1), self.link.predict(full)
            # Before steps of different sizes were seen, tokens seem to cost nothing.
            self.token_s = max(most - self.step_s, self.step_s) / full
            self._refresh_at = step + _REFRESH_STEPS


def _num_equal(left: list[bytes], right: list[bytes]) -> int:
    """Leading elements that are equal."""
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count
