"""What one step is to do: plain data, in the order of the message that carries it (`decoder.proto`)."""

from dataclasses import dataclass, field
from typing import Any

from services.scheduler.core.sequence import Ending, Sequence


@dataclass(frozen=True, slots=True)
class Row:
    """Some tokens of one sequence: `count` of them from `start` on."""

    slot: int
    sequence: Sequence
    start: int
    count: int


@dataclass(slots=True)
class Sample:
    """A token to choose from the logits of a row. The sequence is None once nobody wants the token any more."""

    row: int
    slot: int
    sequence: Sequence | None


@dataclass(slots=True)
class StepPlan:
    """One step. Lists of one group are parallel."""

    step: int
    drop: list[int] = field(default_factory=list)
    new: list[tuple[int, Sequence]] = field(default_factory=list)  # slot, sequence
    edit_slot: list[int] = field(default_factory=list)
    edit_index: list[int] = field(default_factory=list)
    edit_len: list[int] = field(default_factory=list)
    edit_blocks: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    fetch: list[Any] = field(default_factory=list)
    release: list[bytes] = field(default_factory=list)
    sealed_blocks: list[int] = field(default_factory=list)
    sealed_hashes: list[bytes] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return sum(row.count for row in self.rows)

    @property
    def is_empty(self) -> bool:
        """Nothing that a decoder would have to know now. What is sealed can wait for the next plan."""
        return not (self.rows or self.drop or self.fetch or self.release)

    def disown(self, sequence: Sequence) -> None:
        """The tokens that this plan samples for a sequence are not wanted any more."""
        for sample in self.samples:
            if sample.sequence is sequence:
                sample.sequence = None

    def edit(self, slot: int, index: int, blocks: list[int]) -> None:
        """Sets table[slot][index:] to these blocks."""
        self.edit_slot.append(slot)
        self.edit_index.append(index)
        self.edit_len.append(len(blocks))
        self.edit_blocks.extend(blocks)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a decoder answered to a plan: tokens in the order of its samples (-1 where the row failed)."""

    tokens: list[int]
    failed: dict[int, tuple[str, str]] = field(default_factory=dict)  # row -> reason, message


@dataclass(frozen=True, slots=True)
class Progress:
    """What a sequence gained: the committed token if there is one, and its ending if it has ended."""

    sequence: Sequence
    start: int  # index of the token among the outputs
    token: int | None
    ending: Ending | None
    sample: int = -1  # index among the plan's samples, for log-probabilities
