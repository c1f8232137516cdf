"""A decoder played by arithmetic, for tests of the scheduler's core.

It obeys plans as the real one does and keeps, for every position of every block, the tokens that its keys and values
would depend on: a row that reads what was never computed, or was overwritten, fails the test. So does a plan that
divides what the decoder's model needs whole.
"""

import math
from collections import defaultdict
from collections.abc import Collection
from typing import Any

from services.scheduler.core.beams import BeamSearch, Hypothesis
from services.scheduler.core.budget import Capacity
from services.scheduler.core.parts import AttentionKind, Parts
from services.scheduler.core.plan import Progress, StepOutput, StepPlan
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence import EndReason, Sequence

VOCABULARY = 97
History = tuple[int, ...]


def next_token(tokens: list[int], choice: int = 0) -> int:
    """A model: the next token is a function of all before it, and of the choice."""
    return (sum(tokens) * 31 + len(tokens) + 17 * choice) % VOCABULARY + 1


def generate(prompt: list[int], count: int, choice: int = 0) -> list[int]:
    """What a sequence must give, whatever the schedule."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, choice))
    return tokens[len(prompt) :]


def top_tokens(tokens: list[int], k: int) -> list[tuple[int, float]]:
    """Its most probable next tokens; all sums of log-probabilities differ."""
    seed = sum((i + 1) * t for i, t in enumerate(tokens))
    weights = [1.0 + (seed * (7 * t + 3) + t * t) % 1009 / 7.0 for t in range(1, VOCABULARY + 1)]
    total = math.fsum(weights)
    ranked = sorted(range(VOCABULARY), key=lambda t: (-weights[t], t))[:k]
    return [(t + 1, math.log(weights[t] / total)) for t in ranked]


def search_alone(prompt: list[int], search: BeamSearch[Sequence]) -> list[Hypothesis]:
    """What a beam search finds when nothing disturbs it."""
    live = [sequence("alone", prompt, search.max_tokens)]
    search.live = live
    while not search.done:
        for beam in search.live:
            search.answer(beam, top_tokens(beam.tokens, search.num_top))
        pairs = []
        for continuation in search.advance():
            beam = continuation.parent.fork(0)
            beam.tokens.append(continuation.step.token)
            pairs.append((beam, continuation))
        search.assign(pairs)
    return search.finished


class ArithmeticDecoder:
    """Slots, tables and blocks."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self.tokens: dict[int, list[int]] = {}
        self.choices: dict[int, int] = {}
        self.tables: dict[int, list[int]] = {}
        self.sources: dict[int, Sequence] = {}  # prompt and media of each slot
        self.states: dict[int, History] = {}  # outside the blocks: the tokens of which it is made
        self.content: dict[int, list[History | None]] = defaultdict(
            lambda: [None] * capacity.block_size
        )
        self.host: dict[int, list[History | None]] = {}
        self.failed: set[int] = set()  # slots that are ignored until they are dropped
        self.copies = 0
        self.swapped_in = 0

    def run(self, plan: StepPlan, restarted: Collection[Sequence] = ()) -> StepOutput:
        """Applies a plan in the order of the contract. What it computes of restarted sequences is discarded."""
        self._introduce(plan)
        self._edit_tables(plan)
        self._move(plan)
        size = self.capacity.block_size
        self._check_size(plan)
        assert len(set(plan.row_slot)) == len(plan.row_slot)
        assert len(set(plan.sample_slot)) == len(plan.sample_slot)
        rows = list(zip(plan.row_slot, plan.row_start, plan.row_count, strict=True))
        # Sequences that share what a failed row should have computed get wrong values; the scheduler restarts them.
        doubtful = {
            slot
            for slot, owner in zip(plan.row_slot, plan.row_sequence, strict=True)
            if owner in restarted
        }
        ended = {
            slot
            for slot, owner in zip(plan.row_slot, plan.row_sequence, strict=True)
            if owner.ended
        }
        written: set[tuple[int, int]] = set()
        for slot, start, count in rows:  # all of it is written first
            if slot in self.failed:
                continue
            self._check_row(slot, start, start + count)
            if self.capacity.has_state and slot not in doubtful | ended:
                assert start in (0, len(self.states[slot]))
                assert self.states[slot][:start] == tuple(self.tokens[slot][:start])
            self.states[slot] = tuple(self.tokens[slot][: start + count])
            for position in range(start, start + count):
                place = self.tables[slot][position // size], position % size
                assert place not in written, "two rows write to one place"
                written.add(place)
                history = None if slot in doubtful else self._history(slot, position)
                self.content[place[0]][place[1]] = history
        for slot, start, count in rows:  # then attention reads all of it
            if slot in self.failed or slot in doubtful:
                continue
            if not self._reads_right(slot, start + count):
                # Nobody may wait for what comes of it, and nobody may find it.
                assert slot in ended
                self._spoil(slot, start, count)
        for child, parent in zip(plan.fork_child, plan.fork_parent, strict=True):
            if child in plan.sample_slot and child not in plan.row_slot:
                self.states[child] = self.states[parent]
        return self._sample(plan, rows)

    def _check_size(self, plan: StepPlan) -> None:
        """A step exceeds its budget only by one row, which must not be divided."""
        capacity = self.capacity
        assert plan.num_tokens == sum(plan.row_count) <= capacity.largest_step
        if plan.num_tokens > capacity.max_batched_tokens:
            assert plan.num_tokens - max(plan.row_count) < capacity.max_batched_tokens

    def _check_row(self, slot: int, start: int, end: int) -> None:
        """Nothing is divided that must be whole."""
        parts, source = self.capacity.parts, self.sources[slot]
        if parts.whole_prompt:
            assert end == len(self.tokens[slot])
        if parts.attention is AttentionKind.PREFIX_LM:
            assert end >= source.prompt_len
        if parts.attention is AttentionKind.BIDIRECTIONAL_MEDIA:
            for span in source.media:
                assert not span.offset < start < span.end and not span.offset < end < span.end

    def _history(self, slot: int, position: int) -> History:
        """What the keys and values of a position depend on."""
        attention, source = self.capacity.parts.attention, self.sources[slot]
        end = position + 1
        if attention is AttentionKind.PREFIX_LM:
            end = max(end, source.prompt_len)
        values = self.tokens[slot][:end]
        for span in source.media:
            if (
                attention is AttentionKind.BIDIRECTIONAL_MEDIA
                and span.offset <= position < span.end
            ):
                values = self.tokens[slot][: span.end]
            inside = range(span.offset, min(span.end, len(values)))
            values[inside.start : inside.stop] = [-1 - span.digest[0]] * len(inside)
        return tuple(values)

    def fail(self, plan: StepPlan, row: int) -> list[int]:
        """Takes back what a row of the plan that was run last has written. Returns the samples that fail with it."""
        slot = plan.row_slot[row]
        self._spoil(slot, plan.row_start[row], plan.row_count[row])
        samples = [i for i, of in enumerate(plan.sample_row) if of == row]
        self.failed |= {slot, *(plan.sample_slot[i] for i in samples)}
        return samples

    def _reads_right(self, slot: int, count: int) -> bool:
        """Whether the first tokens of a slot are in its blocks as they were computed from each other."""
        size, table = self.capacity.block_size, self.tables[slot]
        return all(
            self.content[table[position // size]][position % size] == self._history(slot, position)
            for position in range(count)
        )

    def _spoil(self, slot: int, start: int, count: int) -> None:
        size = self.capacity.block_size
        for position in range(start, start + count):
            self.content[self.tables[slot][position // size]][position % size] = None

    def _introduce(self, plan: StepPlan) -> None:
        self.failed -= set(plan.drop)
        for slot in plan.drop:
            del self.tokens[slot], self.tables[slot], self.choices[slot]
            del self.sources[slot], self.states[slot]
        for slot, new in plan.new:
            assert slot not in self.tokens
            self.tokens[slot], self.tables[slot] = list(new.tokens), []
            self.sources[slot], self.states[slot] = new, ()
            self.choices[slot] = new.choice
        forks = zip(plan.fork_child, plan.fork_parent, plan.fork_choice, strict=True)
        for child, parent, choice in forks:
            assert child not in self.tokens
            self.tokens[child] = list(self.tokens[parent])
            self.tables[child] = list(self.tables[parent])
            self.choices[child] = choice
            self.sources[child], self.states[child] = self.sources[parent], self.states[parent]
        for slot, token in zip(plan.set_token_slot, plan.set_token, strict=True):
            self.tokens[slot][-1] = token

    def _edit_tables(self, plan: StepPlan) -> None:
        at = 0
        for slot, index, count in zip(plan.edit_slot, plan.edit_index, plan.edit_len, strict=True):
            blocks = plan.edit_blocks[at : at + count]
            at += count
            assert all(0 < b < self.capacity.num_blocks for b in blocks)
            assert index <= len(self.tables[slot])
            self.tables[slot][index:] = blocks
        assert at == len(plan.edit_blocks)

    def _move(self, plan: StepPlan) -> None:
        assert not (self.capacity.has_state and (plan.swap_out_device or plan.sealed_blocks))
        for device, host in zip(plan.swap_out_device, plan.swap_out_host, strict=True):
            assert 0 <= host < self.capacity.num_host_blocks
            self.host[host] = list(self.content[device])
        for src, dst in zip(plan.copy_src, plan.copy_dst, strict=True):
            self.content[dst] = list(self.content[src])
            self.copies += 1
        for host, device in zip(plan.swap_in_host, plan.swap_in_device, strict=True):
            self.content[device] = list(self.host[host])
            self.swapped_in += 1

    def _sample(self, plan: StepPlan, rows: list[tuple[int, int, int]]) -> StepOutput:
        output = StepOutput([])
        for sample, (row, slot) in enumerate(zip(plan.sample_row, plan.sample_slot, strict=True)):
            tokens = self.tokens[slot]
            _, start, count = rows[row]
            if slot in self.failed:
                output.tokens.append(-1)
                output.top[sample] = []
                continue
            assert start + count == len(tokens)
            search = plan.sample_sequence[sample].beams
            if search is not None:
                output.top[sample] = top_tokens(tokens, search.num_top)
            output.tokens.append(next_token(tokens, self.choices[slot]))
        for slot, token in zip(plan.sample_slot, output.tokens, strict=True):
            if token >= 0:
                self.tokens[slot].append(token)
        return output


def capacity(attention: AttentionKind = AttentionKind.CAUSAL, **changes: int) -> Capacity:
    whole_prompt = bool(changes.pop("whole_prompt", False))
    values: dict[str, Any] = {
        "num_blocks": 64,
        "block_size": 4,
        "max_slots": 8,
        "max_model_len": 200,
        "max_batched_tokens": 32,
        "parts": Parts(attention, whole_prompt),
    }
    return Capacity(**{**values, **changes})


def sequence(
    name: str, prompt: list[int], max_tokens: int, arrival: int = 0, **more: object
) -> Sequence:
    return Sequence(name, list(prompt), len(prompt), max_tokens, arrival=arrival, **more)  # type: ignore[arg-type]


Name = tuple[str, int]


class Drive:
    """Runs scheduler and decoder with plans one ahead, collecting outputs and endings by request and choice."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.decoder = ArithmeticDecoder(scheduler.capacity)
        self.in_flight: list[StepPlan] = []
        self.outputs_of: dict[Name, list[int]] = defaultdict(list)
        self.endings_of: dict[Name, EndReason] = {}
        self.found: dict[str, list[Hypothesis]] = {}  # by beam searches
        self.fetches: list[bytes] = []  # artifacts that the decoder was told to pull

    @property
    def outputs(self) -> dict[str, list[int]]:
        """Of the first choices."""
        return defaultdict(list, {n: o for (n, choice), o in self.outputs_of.items() if not choice})

    @property
    def endings(self) -> dict[str, EndReason]:
        """Of the first choices."""
        return {name: e for (name, choice), e in self.endings_of.items() if not choice}

    def send(self) -> bool:
        """Makes a plan, if there is one."""
        plan = self.scheduler.plan()
        if plan is None:
            return False
        self.in_flight.append(plan)
        self.fetches += plan.fetch
        return True

    def restarted(self) -> Collection[Sequence]:
        """Sequences that were restarted since the oldest plan in flight was made."""
        return self.scheduler.state.in_flight[0].restarted

    def answer(self) -> list[Progress]:
        """Has the oldest plan run."""
        plan = self.in_flight.pop(0)
        result = self.scheduler.complete(self.decoder.run(plan, self.restarted()))
        progress = list(result)
        for p in progress:
            name = p.sequence.request_id, p.sequence.choice
            assert name not in self.endings_of
            if p.token is not None:
                assert p.start == len(self.outputs_of[name])
                self.outputs_of[name].append(p.token)
            if p.ending is not None:
                self.endings_of[name] = p.ending.reason
        for search in result.beams:
            self.found[search.live[0].request_id] = search.finished
        return progress

    def step(self) -> list[Progress]:
        """One plan and its answer."""
        assert self.send()
        return self.answer()

    def finish(self) -> None:
        """Runs until nothing is left."""
        for _ in range(3_000):
            while len(self.in_flight) < 2 and self.send():
                pass
            if not self.in_flight:
                return
            self.answer()
        raise AssertionError("it never ended")
