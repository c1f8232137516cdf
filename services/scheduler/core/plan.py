"""What one step is to do, and what came of it: plain data, in the order of the messages (`decoder.proto`)."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from services.scheduler.core.beams import BeamSearch
from services.scheduler.core.sequence import Ending, EndReason, Error, Sequence
from shared.step_columns import PLAN_COLUMNS, PlanColumns

_URGENT_COLUMNS = tuple(name for name in PLAN_COLUMNS if name != "sealed_blocks")


@dataclass(frozen=True, slots=True)
class Row:
    """Some tokens of one sequence: `count` of them from `start` on."""

    slot: int
    sequence: Sequence
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Sample:
    """A token to sample from the logits of a row."""

    row: int
    slot: int
    sequence: Sequence


@dataclass(slots=True)
class StepPlan(PlanColumns[list[int]]):
    """One step, in columns: lists of one group are parallel and go to the decoder as they are."""

    step: int
    new: list[tuple[int, Sequence]] = field(default_factory=list)  # slot, sequence
    fetch: list[Any] = field(default_factory=list)
    release: list[bytes] = field(default_factory=list)
    load_adapters: list[tuple[str, str]] = field(default_factory=list)  # digest, folder
    unload_adapters: list[str] = field(default_factory=list)
    sealed_hashes: list[bytes] = field(default_factory=list)
    num_tokens: int = 0  # to compute
    num_pairs: int = 0  # of these and the tokens that they attend to, themselves included

    # Not for the decoder. `has_decoding`: its duration is a time between tokens, for sequences decode while it runs.
    has_decoding: bool = False
    row_sequence: list[Sequence] = field(default_factory=list)
    sample_sequence: list[Sequence] = field(default_factory=list)
    pool_sequence: list[Sequence] = field(default_factory=list)

    @property
    def rows(self) -> list[Row]:
        """The rows one by one."""
        columns = (self.row_slot, self.row_sequence, self.row_start, self.row_count)
        return [Row(*row) for row in zip(*columns, strict=True)]

    @property
    def samples(self) -> list[Sample]:
        """The samples one by one."""
        columns = (self.sample_row, self.sample_slot, self.sample_sequence)
        return [Sample(*sample) for sample in zip(*columns, strict=True)]

    @property
    def is_empty(self) -> bool:
        """Whether the decoder need not be told anything now. What is sealed can wait for the next plan."""
        columns = any(getattr(self, name) for name in _URGENT_COLUMNS)
        adapters = self.load_adapters or self.unload_adapters
        return not (columns or self.fetch or self.release or adapters)

    @property
    def num_swapped(self) -> int:
        """Blocks that move between device and host."""
        return len(self.swap_out_device) + len(self.swap_in_device)

    def fork(self, child: Sequence, parent: Sequence) -> None:
        """The child takes over tokens, sampler state and block table of the parent."""
        self.fork_child.append(child.slot)
        self.fork_parent.append(parent.slot)
        self.fork_choice.append(child.choice)

    def copy(self, src: int, dst: int) -> None:
        """Copies a block."""
        self.copy_src.append(src)
        self.copy_dst.append(dst)

    def edit(self, slot: int, index: int, blocks: list[int]) -> None:
        """Sets table[slot][index:] to these blocks."""
        self.edit_slot.append(slot)
        self.edit_index.append(index)
        self.edit_len.append(len(blocks))
        self.edit_blocks.extend(blocks)

    def add_row(self, sequence: Sequence, start: int, count: int) -> int:
        """Computes some tokens of a sequence. Returns the index of the row."""
        self.row_slot.append(sequence.slot)
        self.row_start.append(start)
        self.row_count.append(count)
        self.row_sequence.append(sequence)
        self.num_tokens += count
        self.num_pairs += count * start + count * (count + 1) // 2
        return len(self.row_slot) - 1

    def add_sample(self, row: int, sequence: Sequence) -> None:
        """Samples a sequence's next token from the logits at the end of a row."""
        self.sample_row.append(row)
        self.sample_slot.append(sequence.slot)
        self.sample_sequence.append(sequence)

    def spread(self, drafted: list[int]) -> list[int]:
        """Of each token of a result the sample that it belongs to. drafted: how many drafts each row has that may have
        some; such a row has one sample."""
        asked = (row for row, most in enumerate(self.row_drafts) if most)
        more = {row: count for row, count in zip(asked, drafted, strict=True) if count}
        return [
            sample
            for sample, row in enumerate(self.sample_row)
            for _ in range(1 + more.get(row, 0))
        ]

    def add_pool(self, row: int, sequence: Sequence) -> None:
        """Pools a sequence whose last tokens are in a row."""
        self.pool_row.append(row)
        self.pool_slot.append(sequence.slot)
        self.pool_sequence.append(sequence)

    def add_generating(self, sequences: list[Sequence], starts: list[int]) -> None:
        """Computes one token of each sequence and samples the next from it."""
        first, count = len(self.row_slot), len(sequences)
        slots = [s.slot for s in sequences]
        self.row_slot += slots
        self.row_start += starts
        self.row_count += [1] * count
        self.row_sequence += sequences
        self.num_tokens += count
        self.num_pairs += count + sum(starts)
        self.sample_row.extend(range(first, first + count))
        self.sample_slot += slots
        self.sample_sequence += sequences


@dataclass(slots=True)
class PendingStep:
    """A plan until it is answered, and what must be remembered of it so long."""

    plan: StepPlan
    # Sequences that were restarted since the plan was made: what it samples for them is discarded.
    restarted: set[Sequence] = field(default_factory=set)
    # Rows without a sample: the sequence, its generation, and the index after the last token of the row.
    chunks: list[tuple[Sequence, int, int]] = field(default_factory=list)
    # In order, the blocks that a sequence found in the prefix cache, or (True) added to it by what it computes.
    cache_uses: list[tuple[Sequence, list[int], bool]] = field(default_factory=list)
    # Rows that may have drafts, in order.
    drafted: list["DraftedRow"] = field(default_factory=list)
    slack: dict[int, int] = field(default_factory=dict)  # by row, where there is any

    def put_lookahead(self) -> None:
        """Says in the plan's columns which rows may have drafts, and which may start later."""
        if not self.drafted and not self.slack:
            return
        count = len(self.plan.row_slot)
        self.plan.row_drafts, self.plan.row_slack = [0] * count, [0] * count
        for one in self.drafted:
            self.plan.row_drafts[one.row] = one.most
        for row, slack in self.slack.items():
            self.plan.row_slack[row] = slack


class DraftedRow(NamedTuple):
    """A row that may have drafts."""

    row: int
    sample: int
    sequence: Sequence
    generation: int  # of the sequence, when it was planned
    most: int


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a decoder answered to a plan: tokens in the order of its samples (-1 where the row failed)."""

    tokens: list[int]  # of a row with drafts the first one
    failed: dict[int, Error] = field(default_factory=dict)  # by row
    # Sample -> the most probable tokens and their log-probabilities, descending. For sequences of a beam search.
    top: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    drafted: list[int] = field(default_factory=list)  # drafts in each row that may have some
    more: dict[int, list[int]] = field(
        default_factory=dict
    )  # by sample what follows, of right drafts
    # By sample where in the decoder's columns it is; empty where these have one entry for each sample.
    places: list[int] = field(default_factory=list)


class Progress(NamedTuple):
    """What a sequence gained: the committed token if there is one, and its ending if it has ended."""

    sequence: Sequence
    start: int  # index of the token among the outputs
    token: int | None
    ending: Ending | None
    sample: int = -1  # index among the plan's samples, for log-probabilities
    pool: int = -1  # index among the plan's pools, of a sequence that has become a vector


@dataclass(slots=True)
class StepProgress:
    """What a step gave, in columns; `endings` and `pools` by index. Iterating gives one `Progress` after the other."""

    sequences: list[Sequence] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    tokens: list[int | None] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    endings: dict[int, Ending] = field(default_factory=dict)
    pools: dict[int, int] = field(default_factory=dict)
    beams: list[BeamSearch[Sequence]] = field(default_factory=list)  # that have come to their end

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[Progress]:
        columns = (self.sequences, self.starts, self.tokens, self.samples)
        for index, (sequence, start, token, sample) in enumerate(zip(*columns, strict=True)):
            ending, pool = self.endings.get(index), self.pools.get(index, -1)
            yield Progress(sequence, start, token, ending, sample, pool)

    def extend(self, other: "StepProgress") -> None:
        """Appends the progress of something else."""
        first = len(self)
        self.sequences += other.sequences
        self.starts += other.starts
        self.tokens += other.tokens
        self.samples += other.samples
        self.endings.update((first + index, ending) for index, ending in other.endings.items())
        self.pools.update((first + index, pool) for index, pool in other.pools.items())
        self.beams += other.beams

    def add(
        self, sequence: Sequence, token: int | None, ending: Ending | None, sample: int = -1
    ) -> None:
        """Appends a token, or an ending without one."""
        start = sequence.num_output_tokens - (token is not None)
        if ending is not None:
            self.endings[len(self.sequences)] = ending
        self.sequences.append(sequence)
        self.starts.append(start)
        self.tokens.append(token)
        self.samples.append(sample)

    def add_pooled(self, sequence: Sequence, pool: int) -> None:
        """Appends the end of a sequence that has become the vector of a pool."""
        self.pools[len(self.sequences)] = pool
        self.add(sequence, None, Ending(EndReason.STOP))
