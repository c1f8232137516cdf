"""Rows that ran on a token which the device could not choose, computed again with the one that the host chose."""

from collections.abc import Sequence

import numpy as np
import torch

from services.decoder.devices.base.device import Device
from services.decoder.devices.base.staging import Array
from services.decoder.models.decoder_model import DecoderModel
from services.decoder.steps.attention_meta import PagedKV
from services.decoder.worker.inputs.media_rows import ReadRows
from services.decoder.worker.inputs.rows import Longs, Rows
from services.decoder.worker.inputs.step_inputs import Inputs
from services.decoder.worker.launched_step import LaunchedStep
from services.decoder.worker.slots.encoder_blocks import EncoderBlocks
from services.decoder.worker.slots.slots import SlotTable
from services.decoder.worker.token_choice import SampleArrays


class Recomputation:
    """Runs single rows of a step once more, while nothing else runs."""

    def __init__(
        self,
        model: DecoderModel,
        device: Device,
        slots: SlotTable,
        read: ReadRows,
        kv: Sequence[PagedKV],
        encoder: EncoderBlocks,
    ) -> None:
        """kv: the cache of every layer with blocks."""
        self._model, self._kv = model, kv
        # Without tokens of the device: the host knows them all by now.
        self._inputs = Inputs(
            slots,
            device,
            read,
            model.levels,
            model.needs.attention,
            encoder=None if encoder.empty else encoder,
        )

    @torch.inference_mode()
    def run(self, step: LaunchedStep, arrived: Sequence[Array]) -> list[Array]:
        """The step's download as it would be, had its rows in `redo` been given the right tokens. What they wrote to
        the cache is written anew but for keys of media; state is that from before the step again."""
        assert step.batch is not None
        states = step.batch.states
        index = np.flatnonzero(np.isin(step.batch.rows.place, list(step.redo)))
        rows = step.batch.rows.select(index)
        ends = np.cumsum(rows.count)
        of_rows = None if states is None else states.select(index)
        batch = self._inputs.build(rows, ends, states=of_rows)
        hidden = self._model.embed(batch.step.ids, batch.embeds, batch.runs)
        hidden = self._model.forward(hidden, batch.step, self._kv)
        found = [np.array(array) for array in arrived]
        sums = hidden.sum(-1, dtype=torch.float32).cpu().numpy()
        for row, end, count in zip(index, ends, rows.count, strict=True):
            after = step.batch.last[row] + 1
            found[0][after - count : after] = sums[end - count : end]
        self._choose_again(step, hidden, rows, ends, found)
        return found

    def _choose_again(
        self,
        step: LaunchedStep,
        hidden: torch.Tensor,
        rows: Rows,
        ends: Longs,
        found: list[Array],
    ) -> None:
        row_of = step.plan.sample_row[step.samples]
        affected = np.flatnonzero(np.isin(row_of, rows.place))
        if not len(affected):
            return
        last_of = dict(zip(rows.place.tolist(), (ends - 1).tolist(), strict=True))
        picked = torch.tensor([last_of[row] for row in row_of[affected].tolist()])
        last = hidden.index_select(0, picked.to(hidden.device))
        logits = self._model.logits(last).cpu().numpy()
        arrays = SampleArrays.of(step.split, found[1:])
        if arrays.logits is not None:
            given = step.split.whole[affected]
            arrays.logits[step.split.logits_of(affected[given])] = logits[given]
        if arrays.tokens is not None and arrays.values is not None:
            arrays.values[affected] = logits.max(axis=1)
            chosen = logits.argmax(axis=1)
            if step.draws is not None:
                chosen = step.draws.choose(logits, affected)
            arrays.tokens[affected] = chosen
