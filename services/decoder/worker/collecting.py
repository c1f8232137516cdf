"""What a step has computed becomes its result: failures, tokens, log-probabilities."""

from collections.abc import Callable, Sequence

import numpy as np
import structlog
import torch
from torch import Tensor

from services.decoder.devices.base.ops import BaseOps
from services.decoder.devices.base.staging import Array
from services.decoder.media.embeddings import Embeddings
from services.decoder.sampling.choices import nan_logits, pack_logprobs
from services.decoder.sampling.sampler import Sampler
from services.decoder.steps.attention_meta import PagedKV
from services.decoder.worker.inputs.rows import Flags, Longs
from services.decoder.worker.launched_step import LaunchedStep
from services.decoder.worker.plans.drafts import counts_of
from services.decoder.worker.pooling import Pooling
from services.decoder.worker.prompt_logprobs import PromptLogprobs
from services.decoder.worker.slots.accepting import Accepting
from services.decoder.worker.slots.slots import SlotTable
from services.decoder.worker.token_choice import TokenChoice
from shared.errors import ServingError
from tessera.decoder.v1.decoder_pb2 import FailedRow, StepResult

log = structlog.get_logger(__name__)

Tokens = np.ndarray[tuple[int], np.dtype[np.int32]]
Deliver = Callable[[StepResult], None]


class Collecting:
    """Makes results of what has arrived on the host, and completes the histories."""

    def __init__(
        self,
        ops: BaseOps,
        slots: SlotTable,
        sampler: Sampler,
        choice: TokenChoice,
        accepting: Accepting,
        prompt_logprobs: PromptLogprobs,
        pooling: Pooling,
        embeddings: Embeddings,
        kv: Sequence[PagedKV],
    ) -> None:
        """kv: the cache of every layer."""
        self._ops, self._kv = ops, kv
        self._slots, self._sampler, self._choice = slots, sampler, choice
        self._accepting, self._pooling = accepting, pooling
        self._prompt_logprobs, self._embeddings = prompt_logprobs, embeddings

    def finish(
        self,
        step: LaunchedStep,
        arrived: Sequence[Array],
        later: Sequence[LaunchedStep],
        deliver: Deliver,
    ) -> None:
        """Hands over the result of a step, and completes the histories of its sequences then, while the result is on
        its way. arrived: content of the step's download; later: the steps that have been launched since."""
        plan, result = step.plan, step.result
        tokens = np.empty(len(plan.sample_row), np.int32)
        tokens.fill(-1)
        if step.batch is not None:
            self._fail_not_finite(step, np.isfinite(arrived[0]), later)
            if step.reported:
                self._report_prompt(step)
            sampled, pooled = self._pooling.divide(step.pooled, arrived[1:])
            self._sample(step, sampled, tokens, later)
            self._pool(step, pooled, later)
        for row, error in sorted(step.failed.items()):
            result.failed.append(FailedRow(row=row, failure=error.to_failure()))
            who = self._slots.names.get(int(plan.row_slot[row]), {})
            log.warning("row failed", **who, step=plan.step, reason=error.reason)
        result.tokens = tokens.astype("<i4").tobytes()
        if plan.drafts is not None:
            result.accepted = plan.drafts.accepted(tokens)
        if len(plan.row_drafts):
            result.drafted = counts_of(plan)
        ready, lost = self._embeddings.report()
        result.artifacts_ready.extend(ready)
        result.artifacts_lost.extend(lost)
        step.times.sample_us = step.watch.lap_us()
        result.times.CopyFrom(step.times)
        deliver(result)
        if len(step.samples):
            self._complete(step, tokens[step.samples])

    def _fail_not_finite(
        self, step: LaunchedStep, finite: Flags, later: Sequence[LaunchedStep]
    ) -> None:
        """Ends the sequences in question and takes what they wrote out of the cache, where even a
        masked NaN would spread to the next owner of the block."""
        assert step.batch is not None
        if finite.all():
            return
        batch = step.batch
        bad_rows = np.unique(batch.token_rows[~finite[: len(batch.token_rows)]])
        tainted = ~finite
        if step.plan.proposed is not None and step.plan.drafts is not None:
            # A draft that nobody asked for fails nothing: what was chosen behind it fails, and is taken back.
            own = batch.last - step.plan.drafts.count[batch.rows.place]
            bad_rows = bad_rows[~finite[own[bad_rows]]]
        tainted[: len(batch.token_rows)] |= np.isin(batch.token_rows, bad_rows)
        for after in later:  # their sequences may have been given the blocks
            tainted &= ~after.overwrites(batch.written, self._slots.block_size)
        self.scrub(batch.step.meta.slots, np.flatnonzero(tainted))
        for row in bad_rows.tolist():
            self._fail_row(step, int(batch.rows.place[row]), nan_logits(), later)

    @torch.inference_mode()
    def scrub(self, written: Tensor, tainted: Longs) -> None:
        """Takes out of the cache what was written for some tokens of a batch; written: the place of each token."""
        index = torch.from_numpy(tainted).to(written.device)
        for layer in self._kv:
            self._ops.scrub(layer, written[index])

    def _fail_row(
        self,
        step: LaunchedStep,
        place: int,
        error: ServingError,
        later: Sequence[LaunchedStep] = (),
    ) -> None:
        """Ends a row's sequence; what later steps compute of it is ignored, and not reported again."""
        slot = int(step.plan.row_slot[place])
        if place in step.void:
            return
        step.failed[place] = error
        if slot in step.dropped:
            return
        self._slots.failed[slot] = True
        for after in later:
            after.void.update(np.flatnonzero(after.plan.row_slot == slot).tolist())

    @torch.inference_mode()
    def _report_prompt(self, step: LaunchedStep) -> None:
        assert step.batch is not None and step.hidden is not None
        rows, ends = step.batch.rows, step.batch.last + 1
        for row in step.reported:
            slot, place = int(rows.slot[row]), int(rows.place[row])
            if place in step.failed:
                continue
            piece = step.hidden[ends[row] - rows.count[row] : ends[row]]
            start = int(rows.start[row])
            try:
                report = self._prompt_logprobs.report(place, slot, start, piece)
                step.result.prompt_logprobs.append(report)
            except ServingError as error:
                self._fail_row(step, place, error)

    def _pool(
        self, step: LaunchedStep, arrived: Sequence[Array], later: Sequence[LaunchedStep]
    ) -> None:
        """Fills in the vectors of the pools whose rows have not failed."""
        if not step.pooled:
            return
        found = [b""] * len(step.plan.pool_row)
        vectors = self._pooling.vectors(arrived)
        for row in step.pooled:
            gone = row.place in step.failed or row.place in step.void or row.slot in step.dropped
            try:
                vector = vectors.take(row, gone)
            except ServingError as error:
                self._fail_row(step, row.place, error, later)
                continue
            if row.pool >= 0:
                found[row.pool] = vector
        step.result.pooled.extend(found)

    def _sample(
        self,
        step: LaunchedStep,
        arrived: Sequence[Array],
        tokens: Tokens,
        later: Sequence[LaunchedStep],
    ) -> None:
        """Fills in the tokens of the samples whose rows have not failed."""
        plan, slots = step.plan, self._slots
        failed = slots.failed[step.owners]
        if step.dropped:  # their slots may belong to others by now
            failed &= ~step.are_dropped(step.owners)
        if step.failed or step.void:  # then a failed row's other samples have no token either
            failed |= np.isin(plan.sample_row[step.samples], [*step.failed, *step.void])
        kept = (~failed).nonzero()[0]
        if not len(kept):
            return
        samples, owner = step.samples[kept], step.owners[kept]
        chosen = self._choice.finish(step, arrived, kept, later)
        if plan.drafts is not None:
            own = plan.proposed is not None
            self._accepting.cut(plan.drafts, samples, owner, chosen, own=own)
        tokens[samples] = chosen.tokens
        for sample, error in chosen.failed.items():
            if int(owner[sample]) not in step.dropped:
                slots.failed[owner[sample]] = True
            step.failed[int(plan.sample_row[samples[sample]])] = error
        if len(wanted := step.wanted_logprobs):
            packed = pack_logprobs(wanted, samples, chosen, self._slots.vocab_size)
            step.result.logprobs, step.result.top_ids, step.result.top_logprobs = packed

    def _complete(self, step: LaunchedStep, tokens: Tokens) -> None:
        """Puts the tokens [computed samples] in the places that were kept for them, and of rows with drafts behind what
        was known; -1: there is none."""
        plan, owners, samples = step.plan, step.owners, step.samples
        if step.dropped:
            here = np.flatnonzero(~step.are_dropped(owners))
            owners, samples, tokens = owners[here], samples[here], tokens[here]
        self._sampler.commit(owners, tokens)
        if plan.drafts is not None:
            several = plan.drafts.are_behind[samples]
            for slot in np.unique(owners[several]).tolist():
                found = tokens[owners == slot]
                self._slots.append(slot, found[found >= 0])
            owners, samples, tokens = owners[~several], samples[~several], tokens[~several]
        row = plan.sample_row[samples]
        self._slots.fill_in(owners, plan.row_start[row] + plan.row_count[row], tokens)
