"""Drafts of a plan: guesses of tokens that a row runs before they are chosen.

The row computes the logits behind each of them in one pass. Tokens are chosen in their order as without drafts, and
each stands as long as the drafts before it are what was chosen: the tokens are those of a run without drafts.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shared.step_columns import RESULT_COLUMNS

Ints = np.ndarray[tuple[int], np.dtype[np.int32]]
Longs = np.ndarray[tuple[int], np.dtype[np.int64]]

NO_DRAFT = -1  # what is expected of a row's last sample


class Drafted(Protocol):
    """A plan."""

    row_slot: Ints
    row_count: Ints
    row_drafts: Ints
    sample_row: Ints
    sample_slot: Ints
    drafts: "Drafts | None"


@dataclass(frozen=True)
class Drafts:
    """Which samples of a plan stand before drafts. Plans without any have none of these."""

    slots: Ints  # of each draft
    tokens: Ints
    row_of: Ints  # by sample of the plan its row
    count: Longs  # by row of the plan how many it has
    order: Longs  # by sample which one it is of its row's, from 0
    expected: Longs  # by sample the draft behind it, or NO_DRAFT

    @classmethod
    def of(
        cls, slots: Ints, tokens: Ints, row_slot: Ints, count: Longs, sample_row: Ints
    ) -> "Drafts":
        """Of a plan's columns, in which each row with n drafts has n + 1 samples."""
        order = np.zeros(len(sample_row), np.int64)
        expected = np.full(len(sample_row), NO_DRAFT, np.int64)
        for row in np.flatnonzero(count).tolist():
            samples = np.flatnonzero(sample_row == row)
            order[samples] = np.arange(len(samples))
            expected[samples[:-1]] = tokens[slots == row_slot[row]]
        return cls(slots, tokens, sample_row, count, order, expected)

    @property
    def behind(self) -> Longs:
        """By sample how many tokens of its row come after the one whose logits are used."""
        behind: Longs = self.count[self.row_of] - self.order
        return behind

    @property
    def are_behind(self) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
        """By sample whether its row has drafts."""
        found: np.ndarray[tuple[int], np.dtype[np.bool_]] = self.count[self.row_of] > 0
        return found

    def of_slot(self, slot: int) -> Ints:
        """Its drafts, in their order."""
        found: Ints = self.tokens[self.slots == slot]
        return found

    def accepted(self, tokens: Ints) -> bytes:
        """The result's `accepted`, of the tokens of all samples; those behind a draft that was not accepted are -1."""
        right = (tokens == self.expected) & (self.expected != NO_DRAFT)
        counts = np.bincount(self.row_of[right], minlength=len(self.count))
        return counts[self.count > 0].astype(RESULT_COLUMNS["accepted"]).tobytes()


def put_into(plan: Drafted, rows: Ints, tokens: Ints) -> None:
    """Adds drafts to rows of a plan that has none: as many tokens to run, and samples behind that of the row. rows: of
    each draft, ascending."""
    added = np.bincount(rows, minlength=len(plan.row_slot))
    plan.row_count = (plan.row_count + added).astype(np.int32)
    samples = 1 + added[plan.sample_row]
    plan.sample_row = np.repeat(plan.sample_row, samples)
    plan.sample_slot = np.repeat(plan.sample_slot, samples)
    slots = plan.row_slot[rows]
    plan.drafts = Drafts.of(slots, tokens, plan.row_slot, added, plan.sample_row)


def counts_of(plan: Drafted) -> bytes:
    """The result's `drafted`: how many drafts each row has that may have some."""
    asked = plan.row_drafts > 0
    added = np.zeros(len(plan.row_slot), np.int64) if plan.drafts is None else plan.drafts.count
    return added[asked].astype(RESULT_COLUMNS["drafted"]).tobytes()
