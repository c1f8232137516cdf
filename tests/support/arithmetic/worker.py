"""The one decoder that computes `MODEL`: applies plans to slots and blocks, and makes their results.

A row continues from the state that its blocks really hold: a row that reads a block which was never written, was
overwritten, or belongs to another salt gives a different text, which the test notices. Where the model has state, a
row continues from that of its slot. A plan that divides what the model needs whole is reported as broken.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from services.decoder.media.media_spans import MediaSpan
from services.decoder.speculation.proposer import Proposer
from services.decoder.steps.needs import AttentionKind, Needs
from services.decoder.worker.plans.drafts import NO_DRAFT, Drafts, counts_of
from services.decoder.worker.plans.plan import Ints, Limits, Plan
from services.decoder.worker.slots.accepting import Accepting
from services.decoder.worker.slots.drafting import Drafting
from services.decoder.worker.slots.kept_by_slot import Introduced
from services.decoder.worker.slots.sealed_blocks import SealedBlocks
from services.decoder.worker.slots.slots import ANY_START, SlotTable
from shared.block_hash import block_names
from shared.errors import Precondition, ServingError
from tessera.decoder.v1.decoder_pb2 import FailedRow, NewSequence, PromptLogprobs, StepResult
from tests.support.arithmetic.model import (
    FIRST_PICTURE_VALUE,
    MODEL,
    Model,
    first_state,
    has_prefix,
    is_alone,
    mix,
    picture_value,
)

NEVER = 0xBAD  # the state of a place that was never written


def pooled_state(state: int, width: int) -> list[float]:
    """The vector that a state becomes."""
    return [float((state >> place) % 1009) for place in range(width)]


def columns(*arrays: Ints) -> Iterator[tuple[int, ...]]:
    """Columns of a plan, line by line."""
    return zip(*(array.tolist() for array in arrays), strict=True)


@dataclass(slots=True)
class Step:
    """What a step has computed so far."""

    rows: list[tuple[int, ...]]  # slot, start, count
    result: StepResult
    ends: list[int | None]  # by row: the state at its end; None where it failed
    drafts: list[int] = field(default_factory=list)  # by row; empty where none has any
    written: dict[tuple[int, int], None] = field(default_factory=dict)  # block and place in it


class Guessing(Proposer):
    """Drafts of which a share is right, the same ones in every run."""

    def __init__(self, worker: "ArithmeticWorker", accuracy: float) -> None:
        self._worker, self._accuracy = worker, accuracy

    def begin(self, slot: int, scope: bytes) -> None:
        """Knows all that it needs."""

    def end(self, slot: int, answer: Ints) -> None:
        """Keeps nothing."""

    def propose(self, slot: int, tokens: Ints, most: int) -> list[int]:
        """By the arithmetic itself, with mistakes."""
        state = mix(self._worker.state_of(slot, len(tokens) - 1), int(tokens[-1]))
        found: list[int] = []
        while len(found) < most:
            is_right = mix(state, 41) % 1000 < 1000 * self._accuracy
            token = self._worker.likely(state, slot)
            found.append(token if is_right else (token + 1) % MODEL.vocabulary)
            state = mix(state, found[-1])
        return found


class ArithmeticWorker:
    """Stands for `services.decoder.worker.worker.Worker`, on the real table of slots and the real names of blocks.

    `broken` is called with a description of what a plan did wrong.
    """

    def __init__(
        self,
        limits: Limits,
        broken: Callable[[str], None],
        needs: Needs | None = None,
        model: Model = MODEL,
        accuracy: float = 0.0,
        max_drafts: int = 3,
    ) -> None:
        """accuracy: share of the drafts that are right which it puts into rows, up to `max_drafts`; 0 puts none."""
        self.limits = limits
        self._model = model
        self.needs = needs or Needs()
        self.sealed = SealedBlocks(limits.num_blocks)
        self.slots = SlotTable(
            limits.max_slots,
            limits.max_model_len,
            limits.block_size,
            MODEL.vocabulary,
            media_ids=MODEL.vocabulary if limits.num_encoder_blocks else 0,
        )
        guessing = None if is_alone(self.needs) or not accuracy else Guessing(self, accuracy)
        self._drafting = Drafting(self.slots, guessing, max_drafts)
        self._accepting = Accepting()
        self.max_drafts = self._drafting.most
        self.drafts_right = self.drafts_wrong = 0
        self.blocks_copied = 0
        self.blocks_swapped_in = 0
        self.content = [[NEVER] * limits.block_size for _ in range(limits.num_blocks)]
        self._host = [[NEVER] * limits.block_size for _ in range(limits.num_host_blocks)]
        self._broken = broken
        # State -> the state before it and the token between them: whatever a block holds can be spelled out.
        self._steps: dict[int, tuple[int, int]] = {}
        self._roots: dict[int, bytes] = {}  # first state -> the parent that it comes from
        # Of models with state outside the blocks: slot -> (tokens that the state covers, the state).
        self._states: dict[int, tuple[int, int]] = {}
        # Slot -> how many of the most probable tokens a result names; only where log-probabilities are wanted.
        self._num_top: dict[int, int] = {}
        self._num_prompt_top: dict[int, int] = {}
        self._widths: dict[int, int] = {}  # slot -> numbers of the vector that it becomes
        self._has_failed = False  # some row, since the last reset

    @property
    def histories(self) -> dict[int, list[int]]:
        """The tokens of each sequence, by slot."""
        slots = self.slots
        known = np.flatnonzero(slots.known).tolist()
        return {slot: slots.tokens[slot, : slots.length[slot]].tolist() for slot in known}

    def reset(self) -> None:
        """Forgets all sequences; sealed blocks stay, and what their scheduler had no time to name is named."""
        if not self._has_failed:
            self.sealed.complete(self.slots)
            self._check_names()
        self._has_failed = False
        self.drop(np.flatnonzero(self.slots.known).astype(np.int32))
        self.slots.clear()

    def run(self, plan: Plan) -> StepResult:
        """Applies a plan and computes its rows."""
        self._drafting.complete(plan)
        self.apply(plan)
        if plan.drafts is not None:
            for slot in np.unique(plan.drafts.slots).tolist():
                self.slots.put_drafts(slot, plan.drafts.of_slot(slot))
        rows = list(columns(plan.row_slot, plan.row_start, plan.row_count))
        result = StepResult(lease=plan.lease, step=plan.step)
        step = Step(rows, result, [None] * len(rows))
        if plan.drafts is not None:
            step.drafts = plan.drafts.count.tolist()
        # In order of position: a row may read a block that an earlier row of the same step fills.
        for row in sorted(range(len(rows)), key=lambda row: rows[row][1]):
            step.ends[row] = self.compute(row, step)
        blocks = dict.fromkeys(block for block, _ in step.written)
        self.sealed.overwrite(np.fromiter(blocks, np.int64, len(blocks)))
        drafts = step.drafts or [0] * len(rows)
        for (slot, start, count), more, end in zip(rows, drafts, step.ends, strict=True):
            if end is not None:
                self.slots.computed[slot] = start + count - more
        for child, parent in columns(plan.fork_child, plan.fork_parent):
            samples_parent = child in plan.sample_slot and child not in plan.row_slot
            if samples_parent and not self.slots.failed[parent]:
                self._states[child] = self._states[parent]
        self._score_prompts(step)
        self._sample(plan, step)
        if len(plan.row_drafts):
            result.drafted = counts_of(plan)
        self._pool(plan, step)
        return result

    def apply(self, plan: Plan) -> None:
        """All of a plan but its rows, in the order of the contract."""
        slots, alone = self.slots, is_alone(self.needs)
        if len(plan.sealed_blocks):
            self._check(not alone, "blocks are sealed that nobody may find")
            self.sealed.seal(plan.sealed_blocks, plan.sealed_hashes)
            self._check_names()
        for slot in plan.drop.tolist():
            self._check(bool(slots.known[slot]), f"slot {slot} is dropped and holds nothing")
        self.drop(plan.drop)
        for new in plan.new:
            slots.introduce(new)
            self._check(bool(new.root_name) != alone, f"the root is {new.root_name!r}")
            self._check_encoder_blocks()
            self._note_logprobs(new)
            self._begin_drafts(new)
            self.use(new.slot)
        for child, parent, choice in columns(plan.fork_child, plan.fork_parent, plan.fork_choice):
            slots.fork(child, parent, choice)
            self._drafting.fork(child, parent, choice)
            self._accepting.fork(child, parent, choice)
            self._states[child] = self._states.get(parent, (0, 0))
            if parent in self._num_top:
                self._num_top[child] = self._num_top[parent]
            self.use(child)
        slots.set_last_tokens(plan.set_token_slot, plan.set_token)
        slots.edit_tables(plan)
        self._move(plan)

    def _check_encoder_blocks(self) -> None:
        """Sequences with the same media share blocks for the keys of these."""
        if limit := self.limits.num_encoder_blocks:
            kept = {tuple((s.digest, s.rows) for s in spans) for spans in self.slots.media.values()}
            used = [-(-sum(rows for _, rows in one) // self.limits.block_size) for one in kept]
            self._check(sum(used) <= limit, f"media take {sum(used)} of {limit} blocks")

    def use(self, slot: int) -> None:
        """A sequence with its media was introduced."""

    def drop(self, slots: Ints) -> None:
        """Forgets sequences."""
        for slot in slots.tolist():
            self._num_top.pop(slot, None)
            self._num_prompt_top.pop(slot, None)
            self._widths.pop(slot, None)
            self._drafting.drop(slot)
            self._accepting.drop(slot)
        self.slots.drop(slots)

    def embedding_rows(self, span: MediaSpan, first: int, last: int) -> list[int]:
        """The values of a picture's embedding rows from `first` up to `last`. Raises a ServingError if they cannot
        be had."""
        return [picture_value(span.digest, row) for row in range(first, last)]

    def compute(self, row: int, step: Step) -> int | None:
        """The state at a row's end; None where it fails, or its slot has failed before."""
        slot, start, count = step.rows[row]
        if self.slots.failed[slot]:
            return None
        why = self._mismatch(slot, start, start + count, step.drafts[row] if step.drafts else 0)
        if why is not None:
            self._check(self._has_failed, why)
            self.fail(row, Precondition("ROW_MISMATCH", why), step)
            return None
        try:
            values = self.values(slot, start, start + count)
            self._check_whole(slot, start, start + count)
            state = self._state_before(slot, start)
        except ServingError as error:
            self.fail(row, error, step)
            return None
        size, table = self.limits.block_size, self.slots.table[slot].tolist()
        for position, value in enumerate(values, start):
            previous, state = state, mix(state, value)
            self._steps[state] = previous, value
            place = table[position // size], position % size
            self._check(place not in step.written, f"two rows write to block {place[0]}")
            step.written[place] = None
            self.content[place[0]][place[1]] = state
        self._states[slot] = start + count, state
        return state

    def fail(self, row: int, error: ServingError, step: Step) -> None:
        """A row fails, and its slot until it is dropped."""
        self.slots.failed[step.rows[row][0]] = True
        self._has_failed = True
        step.result.failed.append(FailedRow(row=row, failure=error.to_failure()))

    def values(self, slot: int, start: int, end: int) -> list[int]:
        """Tokens, and numbers of embedding rows in their places. Raises what the embeddings raise."""
        values: list[int] = self.slots.tokens[slot, start:end].tolist()
        for span in self.slots.media.get(slot, ()):
            places = span.positions.tolist()
            inside = [row for row, place in enumerate(places) if start <= place < end]
            if inside:
                rows = self.embedding_rows(span, inside[0], inside[-1] + 1)
                for row, value in zip(inside, rows, strict=True):
                    values[places[row] - start] = value
        return values

    def first_state(self, slot: int) -> int:
        """The state before a sequence's first token. Raises what the embeddings of a prefix raise."""
        length = int(self.slots.prompt_len[slot]) if has_prefix(self.needs) else 0
        return first_state(self.slots.root_name[slot], self.values(slot, 0, length))

    def _begin_drafts(self, new: NewSequence) -> None:
        introduced = Introduced(new, np.frombuffer(new.tokens, "<i4").astype(np.int64))
        self._drafting.introduce(new.slot, introduced)
        self._accepting.introduce(new.slot, introduced)

    def _goes_on(self, drafts: Drafts, sample: int, slot: int, token: int) -> bool:
        """Whether what comes behind a draft counts, once the token in its place is chosen."""
        expected = int(drafts.expected[sample])
        self.drafts_right += token == expected
        self.drafts_wrong += expected not in (token, NO_DRAFT)
        return token == expected and not self._accepting.ends(slot, token)

    def state_of(self, slot: int, tokens: int) -> int:
        """The state behind so many tokens of a slot, as its blocks have it."""
        block = int(self.slots.table[slot, (tokens - 1) // self.limits.block_size])
        return self.content[block][(tokens - 1) % self.limits.block_size]

    def likely(self, state: int, slot: int) -> int:
        """What a slot goes on with."""
        return self._model.next_token(state, int(self.slots.choice[slot]))

    def _note_logprobs(self, new: NewSequence) -> None:
        if new.HasField("pooling"):
            self._widths[new.slot] = new.pooling.width
        if new.sampling.HasField("logprobs"):
            self._num_top[new.slot] = new.sampling.logprobs
        if new.sampling.HasField("prompt_logprobs"):
            self._num_prompt_top[new.slot] = new.sampling.prompt_logprobs

    def _move(self, plan: Plan) -> None:
        content, host = self.content, self._host
        self._check(not (self.needs.state and len(plan.swap_out_device)), "state is swapped out")
        for device, place in columns(plan.swap_out_device, plan.swap_out_host):
            host[place] = list(content[device])
        for source, target in columns(plan.copy_src, plan.copy_dst):
            content[target] = list(content[source])
        for place, device in columns(plan.swap_in_host, plan.swap_in_device):
            content[device] = list(host[place])
        self.blocks_copied += len(plan.copy_dst)
        self.blocks_swapped_in += len(plan.swap_in_device)
        self.sealed.overwrite(plan.copy_dst)
        self.sealed.overwrite(plan.swap_in_device)

    def _state_before(self, slot: int, start: int) -> int:
        """The state from which a row continues. Raises what the embeddings of a prefix raise."""
        size, before = self.limits.block_size, start - 1
        if not start:
            state = self.first_state(slot)
            self._roots[state] = self.slots.root_name[slot]
            return state
        if self.needs.state:
            position, state = self._states[slot]
            self._check(position == start, f"slot {slot}: {start} planned, state at {position}")
            return state
        block = int(self.slots.table[slot, before // size])
        return self.content[block][before % size]

    def _check_whole(self, slot: int, start: int, end: int) -> None:
        """Nothing is divided that the model needs whole."""
        slots, attention = self.slots, self.needs.attention
        whole = end == slots.length[slot] or not self.needs.whole_prompt
        if has_prefix(self.needs):
            whole = whole and end >= slots.prompt_len[slot]
        if attention is AttentionKind.BIDIRECTIONAL_MEDIA:
            for span in slots.media.get(slot, ()):
                first = int(span.positions[0])
                whole = whole and not (first < start < span.end or first < end < span.end)
        self._check(bool(whole), f"slot {slot}: a row from {start} to {end} of what must be whole")

    def _mismatch(self, slot: int, start: int, end: int, drafts: int) -> str | None:
        slots, here = self.slots, int(self.slots.computed[slot])
        if not slots.known[slot]:
            return f"a row of slot {slot}, which holds nothing"
        if here not in (ANY_START, start):
            return f"slot {slot}: {start} planned, {here} computed"
        if (
            end - drafts > slots.length[slot]
            or end > slots.table_len[slot] * self.limits.block_size
        ):
            return f"slot {slot}: a row to {end}, beyond its tokens or blocks"
        return None

    def _sample(self, plan: Plan, step: Step) -> None:
        """Tokens of the plan's samples, with log-probabilities where they were asked for; -1 where the row failed."""
        slots = self.slots
        tokens: list[int] = []
        own: list[float] = []
        top: list[tuple[int, float]] = []
        drafts = plan.drafts
        behind = [0] * len(plan.sample_row) if drafts is None else drafts.behind.tolist()
        closed: set[int] = set()  # slots of which nothing more counts
        for sample, (row, slot) in enumerate(columns(plan.sample_row, plan.sample_slot)):
            state, end = step.ends[row], step.rows[row][1] + step.rows[row][2] - behind[sample]
            num_top = self._num_top.get(slot)
            if state is None or slots.failed[slot] or slot in closed:
                tokens.append(-1)
                own.append(float("nan"))
                top += [(0, float("nan"))] * (num_top or 0)
                continue
            if behind[sample]:
                state = self.state_of(slot, end)
            length = int(slots.length[slot])
            self._check(length == end, f"slot {slot}: a sample at {end} of {length} tokens")
            tokens.append(self._model.next_token(state, int(slots.choice[slot])))
            own.append(float("nan") if num_top is None else MODEL.logprobs(state)[tokens[-1]])
            top += MODEL.top(state, num_top) if num_top else []
            if (
                drafts is not None
                and drafts.count[row]
                and not self._goes_on(drafts, sample, slot, tokens[-1])
            ):
                closed.add(slot)
            owner = np.asarray([slot])
            place = np.asarray([end], np.int32)
            slots.extend(owner, place)
            slots.fill_in(owner, place, np.asarray(tokens[-1:], np.int32))
        step.result.tokens = np.asarray(tokens, "<i4").tobytes()
        if self._num_top and not np.isnan(own).all():
            step.result.logprobs = _floats(own)
            step.result.top_ids, step.result.top_logprobs = _pack(top)

    def _pool(self, plan: Plan, step: Step) -> None:
        """A vector for each pool, of the state at its row's end; none where the row failed."""
        for row, slot in columns(plan.pool_row, plan.pool_slot):
            state, end = step.ends[row], step.rows[row][1] + step.rows[row][2]
            if state is None or self.slots.failed[slot]:
                step.result.pooled.append(b"")
                continue
            length = int(self.slots.length[slot])
            self._check(length == end, f"slot {slot}: a pool at {end} of {length} tokens")
            step.result.pooled.append(_floats(pooled_state(state, self._widths[slot])))

    def _score_prompts(self, step: Step) -> None:
        """Log-probabilities of the prompt tokens that rows computed, where they were asked for."""
        for row, ((slot, start, count), state) in enumerate(zip(step.rows, step.ends, strict=True)):
            num_top = self._num_prompt_top.get(slot)
            if num_top is None or state is None:
                continue
            some = range(max(start, 1), min(start + count, int(self.slots.prompt_len[slot])))
            if not some:
                continue
            before: dict[int, int] = {}  # position -> the state before it
            for position in reversed(range(start, start + count)):
                before[position] = state = self._steps[state][0]
            tokens = self.slots.tokens[slot].tolist()
            own = [MODEL.logprobs(before[place])[tokens[place]] for place in some]
            ids, values = _pack([one for p in some for one in MODEL.top(before[p], num_top)])
            step.result.prompt_logprobs.append(
                PromptLogprobs(row=row, logprobs=_floats(own), top_ids=ids, top_logprobs=values)
            )

    def _check_names(self) -> None:
        """The name of each block must be that of the tokens whose states it holds."""
        data, hashes = self.sealed.list()
        for i, block in enumerate(np.frombuffer(data, "<i4").tolist()):
            name, state = hashes[16 * i : 16 * i + 16], self.content[block][-1]
            tokens: list[int] = []
            while state not in self._roots and state in self._steps:
                state, token = self._steps[state]
                tokens.append(token)
            if tokens and max(tokens) >= FIRST_PICTURE_VALUE:
                continue  # the names of pictures take part
            ids = np.asarray(tokens[::-1], "<i4").tobytes()
            root = self._roots.get(state, b"")
            if not ids or block_names(root, ids, self.limits.block_size)[-1] != name:
                self._broken(f"block {block} has a name that is not that of its tokens")

    def _check(self, right: bool, what: str) -> None:
        if not right:
            self._broken(what)


def _floats(values: list[float]) -> bytes:
    return np.asarray(values, "<f4").tobytes()


def _pack(top: list[tuple[int, float]]) -> tuple[bytes, bytes]:
    """Ids and values as the columns of a result."""
    return np.asarray([i for i, _ in top], "<i4").tobytes(), _floats([value for _, value in top])
