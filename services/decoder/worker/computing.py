"""What a step submits to the device, within what the device's memory holds."""

from collections.abc import Callable, Sequence
from threading import Condition

import numpy as np
import torch
from torch import Tensor

from services.decoder.devices.base.device import Device
from services.decoder.models.decoder_model import DecoderModel
from services.decoder.ranks.rank_group import RankGroup
from services.decoder.steps.step import Step
from services.decoder.worker.collecting import Collecting
from services.decoder.worker.inputs.step_inputs import Batch
from services.decoder.worker.launched_step import LaunchedStep
from services.decoder.worker.pooling import Pooling
from services.decoder.worker.preparing import Preparing
from services.decoder.worker.token_choice import TokenChoice
from shared.errors import Overloaded

# Hidden rows [T, H] of a step with embeddings in runs of its tokens.
Forward = Callable[[Step, Sequence[Tensor], Sequence[tuple[int, int]]], Tensor]


class Computing:
    """Runs the model over the rows of launched steps, on the thread that launches."""

    def __init__(
        self,
        model: DecoderModel,
        device: Device,
        forward: Forward,
        preparing: Preparing,
        choice: TokenChoice,
        pooling: Pooling,
        collecting: Collecting,
        lock: Condition,
    ) -> None:
        """forward: runs the model over the cache; lock: guards what `preparing` changes."""
        self._model, self._device, self._forward = model, device, forward
        self._preparing, self._choice, self._pooling = preparing, choice, pooling
        self._collecting, self._lock = collecting, lock

    def run(self, step: LaunchedStep) -> None:
        """Computes; where memory does not suffice once more with what the device holds unused, and then without the
        largest prompt, until it does: up to its samples a step may be computed again. Raises Overloaded where no prompt
        is left."""
        failures = 0
        with torch.inference_mode():
            while step.batch is not None and not self._fits(step, step.batch):
                failures += 1
                step.hidden = step.logits = None
                self._device.free_unused()
                if failures > 1:
                    self._leave_out_largest(step, step.batch)

    def _fits(self, step: LaunchedStep, batch: Batch) -> bool:
        """Computes; whether memory sufficed, of several ranks that of every one. Raises torch.OutOfMemoryError for one
        of several ranks in a step without prompts: what such steps take does not vary, and none waits for the others.
        """
        ranks = self._device.ops.ranks
        is_alone = ranks is None or batch.rows.count.max() == 1
        before = 0 if ranks is None else ranks.calls
        try:
            self._compute(step, batch)
            fits = True
        except torch.OutOfMemoryError:
            if is_alone and ranks is not None:
                raise
            fits = False
        if ranks is None or is_alone:
            return fits
        if not fits:
            self._make_calls(step, batch, ranks, ranks.calls - before)
        return ranks.agree(fits)

    def _make_calls(self, step: LaunchedStep, batch: Batch, ranks: RankGroup, made: int) -> None:
        """Those calls of a step that this rank has not made: the others are in them, and cannot leave them. What comes
        of them is not used. made: how many it has made."""
        sums = self._model.sums
        ops, size = self._device.ops, (len(batch.step.ids), self._model.config.hidden_size)
        hidden = torch.zeros(size, dtype=ops.dtype, device=ops.device)
        for _ in range(made, sums):
            ranks.sum(hidden.zero_())
        if made <= sums and len(step.owners):
            self._choice.submit(step, hidden.zero_(), batch.extra)
        if made <= sums + bool(len(step.owners)):
            self._pooling.submit(step.pooled, hidden.zero_())

    def _leave_out_largest(self, step: LaunchedStep, batch: Batch) -> None:
        """Fails the longest row, and prepares the others anew."""
        rows = batch.rows
        largest = int(rows.count.argmax())
        count = int(rows.count[largest])
        if count == 1:
            raise out_of_memory(f"a step of {len(rows.slot)} sequences does")
        if self._device.ops.ranks is not None:
            # Some wrote what they computed without the summands of others.
            written = batch.step.meta.slots
            self._collecting.scrub(written, np.flatnonzero(batch.token_rows == largest))
        error = out_of_memory(f"{count} tokens of a prompt do")
        with self._lock:
            self._preparing.leave_out(step, batch, largest, error)

    def _compute(self, step: LaunchedStep, batch: Batch) -> None:
        """Submits the rows, and what the sampler needs of their last tokens."""
        if step.is_replayed and self._preparing.graphs is not None:
            hidden = self._preparing.graphs.run(batch.step)
        else:
            hidden = self._forward(batch.step, batch.embeds, batch.runs)
        if step.reported:
            step.hidden = hidden
        wanted = [hidden.sum(-1, dtype=torch.float32)]
        step.times.forward_us = step.watch.lap_us()
        if len(step.owners):
            wanted += self._choice.submit(step, hidden, batch.extra)
        wanted += self._pooling.submit(step.pooled, hidden)
        step.download = self._device.download(*wanted)


def out_of_memory(what: str) -> Overloaded:
    """The failure of what the device's memory does not hold."""
    return Overloaded(
        "OUT_OF_MEMORY",
        f"{what} not fit into the device's memory: lower --max-num-batched-tokens, --max-num-seqs or"
        " --gpu-memory-utilization",
    )
