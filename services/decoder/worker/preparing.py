"""From the rows of a plan that will run to the inputs of a step, and places for the tokens that it gives."""

import numpy as np

from services.decoder.devices.base.device import Device
from services.decoder.devices.base.graphs import Graphs
from services.decoder.models.decoder_model import DecoderModel
from services.decoder.sampling.split import Split
from services.decoder.worker.inputs.media_rows import ReadRows
from services.decoder.worker.inputs.rows import Longs, Rows, order_rows
from services.decoder.worker.inputs.step_inputs import Batch, Inputs
from services.decoder.worker.launched_step import LaunchedStep
from services.decoder.worker.plans.drafts import Drafts
from services.decoder.worker.plans.plan import bad_plan
from services.decoder.worker.pooling import Pooling
from services.decoder.worker.prompt_logprobs import PromptLogprobs
from services.decoder.worker.slots.encoder_blocks import EncoderBlocks
from services.decoder.worker.slots.sealed_blocks import SealedBlocks
from services.decoder.worker.slots.slot_states import SlotStates, StateRows
from services.decoder.worker.slots.slots import SlotTable
from services.decoder.worker.token_choice import TokenChoice
from shared.errors import ServingError


class Preparing:
    """Moves what is kept by slot to where it will be after a step. Called with the worker's lock held."""

    def __init__(
        self,
        model: DecoderModel,
        device: Device,
        slots: SlotTable,
        states: SlotStates,
        encoder: EncoderBlocks,
        sealed: SealedBlocks,
        choice: TokenChoice,
        prompt_logprobs: PromptLogprobs,
        pooling: Pooling,
        read: ReadRows,
    ) -> None:
        self._slots, self._states, self._sealed = slots, states, sealed
        self._has_states = not states.empty
        self._encoder = None if encoder.empty else encoder
        self._choice, self._prompt_logprobs = choice, prompt_logprobs
        self._pooling = pooling
        self._inputs = Inputs(
            slots,
            device,
            read,
            model.levels,
            model.needs.attention,
            choice.last_tokens,
            self._encoder,
        )
        # Of `forward`, for steps that only generate; None where these run as all others do.
        self.graphs: Graphs | None = None

    def prepare(self, step: LaunchedStep, rows: Rows) -> Batch:
        """The tensors of the rows, sent to the device; makes places for the tokens that will be chosen."""
        rows = order_rows(rows)
        ends = rows.count.cumsum()
        drafts = step.plan.drafts
        if drafts is not None:
            self._put_drafts(drafts, rows)
        extra = self._choice.begin(step, rows, ends)
        least_rows = self._rows_of_graph(rows)
        step.is_replayed = least_rows is not None
        states = self._advance(step, rows) if self._has_states else None
        new_media = () if self._encoder is None else self._encoder.advance(rows.slot)
        batch = self._inputs.build(rows, ends, extra, least_rows or 0, states, new_media)
        step.reported = self._prompt_logprobs.reported(rows)
        step.pooled = self._pooling.begin(step.plan, rows, ends)
        self._sealed.overwrite(batch.blocks)
        known = rows.end if drafts is None else rows.end - drafts.count[rows.place]
        self._slots.computed[rows.slot] = known
        if len(step.owners):
            samples, owners = _with_places(step)
            row = step.plan.sample_row[samples]
            self._slots.extend(owners, step.plan.row_start[row] + step.plan.row_count[row])
        return batch

    def leave_out(self, step: LaunchedStep, batch: Batch, row: int, error: ServingError) -> None:
        """Fails a row of the batch before it was computed, and prepares the others anew."""
        rows = batch.rows
        place = int(rows.place[row])
        self._slots.failed[rows.slot[row]] = True
        step.failed[place] = error
        self._slots.length[_with_places(step)[1]] -= 1  # their places are made again
        self._states.go_back(rows.slot, rows.start)
        if self._encoder is not None:
            self._encoder.go_back(batch.new_media)
        step.samples = step.owners = np.zeros(0, np.int64)
        step.draws, step.split = None, Split.largest(0)
        kept = rows.select(np.flatnonzero(rows.place != place))
        step.batch = self.prepare(step, kept) if len(kept.slot) else None

    def _put_drafts(self, drafts: Drafts, rows: Rows) -> None:
        if self._has_states:
            raise bad_plan("draft_slot: layers keep state, which does not go back over drafts")
        for row in np.flatnonzero(drafts.count[rows.place]).tolist():
            slot = int(rows.slot[row])
            self._slots.put_drafts(slot, drafts.of_slot(slot))

    def _advance(self, step: LaunchedStep, rows: Rows) -> StateRows | None:
        """The state of rows that will run. Forks that sample from another's row go on from what that row leaves."""
        found = self._states.advance(rows.slot, rows.start, rows.end)
        if found is None:
            return None
        sources = step.plan.row_slot[step.plan.sample_row[step.samples]]
        for place in np.flatnonzero(sources != step.owners).tolist():
            self._states.fork(int(sources[place]), int(step.owners[place]))
        return found

    def _rows_of_graph(self, rows: Rows) -> int | None:
        """Rows of the graph that computes these; None if there is none: graphs have one token of each row, no
        embeddings of media, and no adapters."""
        if self.graphs is None or self._slots.adapter[rows.slot].any():
            return None
        generates = (rows.count == 1) & (rows.start >= self._slots.prompt_len[rows.slot])
        return self.graphs.size_for(len(rows.slot)) if generates.all() else None


def _with_places(step: LaunchedStep) -> tuple[Longs, Longs]:
    """The samples of a step, and their slots, that are one token behind all that is known. How many a row with drafts
    gives is not known before it is collected."""
    if step.plan.drafts is None:
        return step.samples, step.owners
    single = ~step.plan.drafts.are_behind[step.samples]
    return step.samples[single], step.owners[single]
