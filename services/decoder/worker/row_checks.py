"""Which rows of a plan can run: those that agree with what the decoder knows of their sequences."""

import numpy as np

from services.decoder.worker.inputs.media_rows import ReadRows, spans_of
from services.decoder.worker.inputs.rows import Rows
from services.decoder.worker.launched_step import LaunchedStep
from services.decoder.worker.slots.encoder_blocks import EncoderBlocks
from services.decoder.worker.slots.slot_states import SlotStates
from services.decoder.worker.slots.slots import ANY_START, SlotTable
from shared.errors import Precondition, ServingError


class RowChecks:
    """Checks rows against the table of slots, and that their embeddings are here."""

    def __init__(
        self, slots: SlotTable, read: ReadRows, states: SlotStates, encoder: EncoderBlocks
    ) -> None:
        self._slots, self._read = slots, read
        self._states, self._encoder = states, encoder
        self._has_states = not states.empty

    def runnable(self, step: LaunchedStep) -> Rows:
        """The rows that agree with what is known here; fails the others."""
        plan, slots = step.plan, self._slots
        rows = Rows(
            np.arange(len(plan.row_slot)),
            plan.row_slot.astype(np.int64),
            plan.row_start.astype(np.int64),
            plan.row_count.astype(np.int64),
        )
        if not len(rows.slot):
            return rows
        counted = slots.computed[rows.slot]
        end = rows.end
        good = slots.known[rows.slot] & ~slots.failed[rows.slot]
        good &= (counted == rows.start) | (counted == ANY_START)
        if self._has_states:
            good &= self._states.continues(rows.slot, rows.start)
        # With drafts a row runs more tokens than are known.
        known = end if plan.drafts is None else end - plan.drafts.count
        good &= known <= slots.length[rows.slot]
        good &= end <= slots.table_len[rows.slot] * slots.block_size
        owner = plan.sample_slot.astype(np.int64)
        expected = slots.known[owner] & (slots.length[owner] == known[plan.sample_row])
        expected |= slots.failed[owner]
        good[plan.sample_row[~expected]] = False
        for row in (~good).nonzero()[0].tolist():
            self._refuse(step, rows, row)
        if slots.media:
            for row in np.flatnonzero(good).tolist():
                good[row] = self._has_media(step, rows, row)
        return rows if good.all() else rows.select(np.flatnonzero(good))

    def _refuse(self, step: LaunchedStep, rows: Rows, row: int) -> None:
        slot, slots = int(rows.slot[row]), self._slots
        if not slots.known[slot]:
            step.failed[row] = Precondition("UNKNOWN_SLOT", f"slot {slot} holds no sequence")
            return
        if slots.failed[slot]:
            error = slots.unreported.pop(slot, None)
            if error is not None:
                step.failed[row] = error
            return
        slots.failed[slot] = True
        step.failed[row] = Precondition(
            "ROW_MISMATCH",
            f"slot {slot}: a row of tokens [{rows.start[row]}, {rows.end[row]}) was planned; here"
            f" {slots.computed[slot]} of {slots.length[slot]} tokens are computed (-1: any) and"
            f" {slots.table_len[slot]} blocks are known",
        )

    def _has_media(self, step: LaunchedStep, rows: Rows, row: int) -> bool:
        slot = int(rows.slot[row])
        try:
            for found in spans_of(self._slots, slot, int(rows.start[row]), int(rows.end[row])):
                self._read(*found)
            for kept in self._encoder.unwritten(rows.slot[row : row + 1]):
                for span in kept.spans:
                    self._read(span, 0, span.rows)
        except ServingError as error:
            self._slots.failed[slot] = True
            step.failed[row] = error
            return False
        return True
