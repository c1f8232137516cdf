"""Runs step plans, strictly in order, on one thread. What a plan does depends on nothing but the
plan and what the plans before it left."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import structlog
import torch
from torch import Tensor

from services.decoder.devices.base.device import Device
from services.decoder.models.decoder_model import DecoderModel
from services.decoder.models.layer_spec import paged_layers
from services.decoder.sampling.sampler import nan_logits
from services.decoder.worker.embeddings import Embeddings
from services.decoder.worker.inputs import (
    Batch,
    Longs,
    Rows,
    SampledTokens,
    build_batch,
    order_rows,
    spans_of,
)
from services.decoder.worker.media_spans import MediaSpan
from services.decoder.worker.moves import apply_moves
from services.decoder.worker.plan import Limits, Plan
from services.decoder.worker.prompt_logprobs import PromptLogprobs
from services.decoder.worker.sealed_blocks import SealedBlocks
from services.decoder.worker.slots import ANY_START, SlotTable
from shared.errors import Precondition, ServingError
from shared.telemetry.logs import Stopwatch
from shared.telemetry.request_names import names
from tessera.decoder.v1.decoder_pb2 import FailedRow, NewSequence, StepResult, StepTimes

log = structlog.get_logger(__name__)

_NONE: Longs = np.zeros(0, np.int64)
Tokens = np.ndarray[tuple[int], np.dtype[np.int32]]
Deliver = Callable[[StepResult], None]


@dataclass
class LaunchedStep:
    """A plan that is being computed, from `Worker.launch` to `Worker.collect`. Its tensors are on the device."""

    plan: Plan
    result: StepResult
    watch: Stopwatch
    times: StepTimes
    failed: dict[int, ServingError] = field(default_factory=dict)  # by row of the plan
    batch: Batch | None = None  # None if no row runs
    hidden: Tensor | None = None  # [T, H]
    sums: Tensor | None = None  # float32 [T]: finite where the hidden row is
    samples: Longs = field(default_factory=lambda: _NONE)  # of the plan, that are computed
    owners: Longs = field(default_factory=lambda: _NONE)  # the slot of each
    # Of each sample: its largest logit's token and value, or all its logits where that is not enough.
    largest: tuple[Tensor, Tensor] | None = None
    logits: Tensor | None = None


class Worker:
    """The decoder's whole state: slots, sampler, cache; one object for each process."""

    def __init__(
        self, model: DecoderModel, device: Device, limits: Limits, embeddings: Embeddings
    ) -> None:
        """Allocates the cache: `limits.num_blocks` on the device, touched."""
        self.limits = limits
        self.embeddings = embeddings
        self._model = model
        self._device, ops = device, device.ops
        layers = paged_layers(model.layers)
        self._kv = [ops.alloc_kv(layer, limits.num_blocks) for layer in layers]
        self._host_kv = [ops.alloc_host_kv(layer, limits.num_host_blocks) for layer in layers]
        vocabulary = model.config.vocab_size
        self.slots = SlotTable(
            limits.max_slots,
            limits.max_model_len,
            limits.block_size,
            vocabulary,
            model.rotary_axes,
        )
        self.sealed = SealedBlocks(limits.num_blocks)
        self._sampler = device.make_sampler(limits.max_slots, vocabulary)
        # The step that was launched last, until it is collected.
        self._newest: LaunchedStep | None = None
        self._prompt_logprobs = PromptLogprobs(model, self.slots)
        self._has_failed = False  # some row, since the last reset

    def reset(self) -> None:
        """Forgets all sequences; sealed blocks and embeddings stay.

        The scheduler hashes blocks once it has their tokens, several at a time; the remaining ones are hashed here.
        After a failed row nothing is added: only the scheduler knows which blocks depend on it.
        """
        if not self._has_failed:
            self.sealed.complete(self.slots)
        self._has_failed = False
        for slot in np.flatnonzero(self.slots.known).tolist():
            self._forget(slot)
        self.slots.clear()
        self.embeddings.forget_sequences()

    def step(self, plan: Plan, deliver: Deliver, queue_us: int = 0) -> None:
        """Launches a plan, collects it and hands over its result."""
        self.collect(self.launch(plan, queue_us), deliver)

    def launch(self, plan: Plan, queue_us: int = 0) -> LaunchedStep:
        """Applies a plan and submits its computation; waits for nothing on the device.

        Histories are as long afterwards as they will be, the new tokens PENDING. The next plan may be launched before
        this one is collected if all its sequences stay and take their largest logit: their tokens are then read on the
        device. Raises InvalidRequest for a plan that contradicts the decoder's state; the stream is then of no use any
        more.
        """
        step = LaunchedStep(
            plan,
            StepResult(lease=plan.lease, step=plan.step),
            Stopwatch(),
            StepTimes(queue_us=queue_us),
        )
        self._apply(plan)
        rows = self._runnable(step)
        if len(rows.slot):
            with torch.inference_mode():
                self._compute(step, rows)
            self.slots.computed[rows.slot] = rows.end
            row = plan.sample_row[step.samples]
            self.slots.extend(step.owners, plan.row_start[row] + plan.row_count[row])
        self._newest = step
        return step

    def collect(self, step: LaunchedStep, deliver: Deliver) -> None:
        """Waits for a step, the oldest that was launched, hands over its result, and completes the histories of its
        sequences then, while the result is on its way.
        """
        if self._newest is step:
            self._newest = None
        plan, result = step.plan, step.result
        tokens = np.full(len(plan.sample_row), -1, np.int32)
        if step.batch is not None:
            with torch.inference_mode():
                self._fail_not_finite(step)
                self._report_prompt(step)
                self._sample(step, tokens)
        self._has_failed = self._has_failed or bool(step.failed)
        for row, error in sorted(step.failed.items()):
            result.failed.append(FailedRow(row=row, failure=error.to_failure()))
            who = self.slots.names.get(int(plan.row_slot[row]), {})
            log.warning("row failed", **who, step=plan.step, reason=error.reason)
        result.tokens = tokens.astype("<i4").tobytes()
        ready, lost = self.embeddings.report()
        result.artifacts_ready.extend(ready)
        result.artifacts_lost.extend(lost)
        step.times.sample_us = step.watch.lap_us()
        result.times.CopyFrom(step.times)
        deliver(result)
        if len(step.samples):
            self._complete(step, tokens[step.samples])

    def _apply(self, plan: Plan) -> None:
        slots = self.slots
        self.embeddings.hold([bytes(ref.digest) for ref in plan.fetch])
        self.sealed.seal(plan.sealed_blocks, plan.sealed_hashes)
        if len(plan.drop):
            for slot in plan.drop.tolist():
                self._forget(slot)
            slots.drop(plan.drop)
        for sequence in plan.new:
            self._introduce(sequence)
        for child, parent, choice in zip(
            plan.fork_child.tolist(),
            plan.fork_parent.tolist(),
            plan.fork_choice.tolist(),
            strict=True,
        ):
            slots.fork(child, parent, choice)
            self._sampler.fork(child, parent, choice)
            self.embeddings.use(span.digest for span in slots.media.get(child, ()))
        slots.set_last_tokens(plan.set_token_slot, plan.set_token)
        if len(plan.edit_slot):
            slots.edit_tables(plan)
        apply_moves(plan, self._device, self._kv, self._host_kv)
        self.sealed.overwrite(plan.copy_dst)
        self.sealed.overwrite(plan.swap_in_device)
        if plan.release:
            self.embeddings.release(bytes(digest) for digest in plan.release)

    def _introduce(self, sequence: NewSequence) -> None:
        slot = sequence.slot
        log.debug(
            "sequence introduced",
            **names(sequence.request_id, sequence.client_request_id),
            choice=sequence.choice,
            slot=slot,
            prompt_tokens=sequence.prompt_len,
            known_tokens=len(sequence.tokens) // 4,
            media=len(sequence.media),
        )
        try:
            tokens = self.slots.introduce(sequence)
            self.embeddings.use(span.digest for span in self.slots.media.get(slot, ()))
            prompt, output = tokens[: sequence.prompt_len], tokens[sequence.prompt_len :]
            params = sequence.sampling
            self._sampler.introduce(slot, sequence.choice, params, prompt, output)
            self.slots.prefix_len[slot] = self._model.prefix(prompt)
            if self._model.rotary_axes:
                rotary = self._model.positions(prompt, sequence.media)
                self.slots.set_rotary(slot, *rotary)
        except ServingError as error:
            if error.reason == "INVALID_PLAN":
                raise
            self.slots.fail(slot, error)
            return
        if params.HasField("prompt_logprobs"):
            self._prompt_logprobs.introduce(slot, params.prompt_logprobs)

    def _forget(self, slot: int) -> None:
        self._sampler.drop(slot)
        self._prompt_logprobs.drop(slot)
        media = self.slots.media.get(slot)
        if media:
            self.embeddings.unuse(span.digest for span in media)

    def _runnable(self, step: LaunchedStep) -> Rows:
        """The rows that agree with what is known here; fails the others."""
        plan, slots = step.plan, self.slots
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
        good &= end <= slots.length[rows.slot]
        good &= end <= slots.table_len[rows.slot] * slots.block_size
        owner = plan.sample_slot.astype(np.int64)
        expected = slots.known[owner] & (slots.length[owner] == end[plan.sample_row])
        expected |= slots.failed[owner]
        good[plan.sample_row[~expected]] = False
        for row in np.flatnonzero(~good).tolist():
            self._refuse(step, rows, row)
        if slots.media:
            for row in np.flatnonzero(good).tolist():
                good[row] = self._has_media(step, rows, row)
        return rows if good.all() else rows.select(np.flatnonzero(good))

    def _refuse(self, step: LaunchedStep, rows: Rows, row: int) -> None:
        slot, slots = int(rows.slot[row]), self.slots
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
            for found in spans_of(self.slots, slot, int(rows.start[row]), int(rows.end[row])):
                self._read(*found)
        except ServingError as error:
            self.slots.failed[slot] = True
            step.failed[row] = error
            return False
        return True

    def _read(self, span: MediaSpan, first: int, last: int) -> Tensor:
        width = self._model.config.hidden_size * (1 + self._model.levels)
        return self.embeddings.rows(span.digest, first, last, len(span.positions), width)

    def _compute(self, step: LaunchedStep, rows: Rows) -> None:
        """Submits the rows, and what the sampler needs of their last tokens."""
        batch = build_batch(
            order_rows(rows),
            self.slots,
            self._device,
            self._read,
            self._sampled(),
            self._model.levels,
            self._model.needs.attention,
        )
        self.sealed.overwrite(batch.blocks)
        step.times.prepare_us = step.watch.lap_us()
        hidden = self._model.embed(batch.step.ids, batch.embeds, batch.runs)
        hidden = self._model.forward(hidden, batch.step, self._kv)
        step.batch, step.hidden = batch, hidden
        step.sums = hidden.sum(-1, dtype=torch.float32)
        step.times.forward_us = step.watch.lap_us()
        self._compute_samples(step, batch, hidden)

    def _sampled(self) -> SampledTokens | None:
        """What was chosen and is known on the device alone."""
        newest = self._newest
        if newest is None or newest.largest is None:
            return None
        return SampledTokens(newest.owners, newest.largest[0])

    def _compute_samples(self, step: LaunchedStep, batch: Batch, hidden: Tensor) -> None:
        plan, slots = step.plan, self.slots
        token_of = np.full(len(plan.row_slot), -1, np.int64)
        token_of[batch.rows.place] = batch.last
        owner = plan.sample_slot.astype(np.int64)
        token = token_of[plan.sample_row]
        usable = (token >= 0) & slots.known[owner] & ~slots.failed[owner]
        step.samples = np.flatnonzero(usable)
        step.owners = owner = owner[step.samples]
        if not len(owner):
            return
        [picked] = self._device.upload(token[step.samples])
        last = hidden.index_select(0, picked)
        if self._sampler.is_plain(owner):
            step.largest = self._model.largest(last)
        else:
            step.logits = self._model.logits(last)

    def _fail_not_finite(self, step: LaunchedStep) -> None:
        """Ends the sequences in question and takes what they wrote out of the cache, where even a
        masked NaN would spread to the next owner of the block."""
        assert step.sums is not None and step.batch is not None
        finite, batch = np.isfinite(step.sums.cpu().numpy()), step.batch
        if finite.all():
            return
        bad_rows = np.unique(batch.token_rows[~finite[: len(batch.token_rows)]])
        tainted = ~finite
        tainted[: len(batch.token_rows)] |= np.isin(batch.token_rows, bad_rows)
        [index] = self._device.upload(np.flatnonzero(tainted))
        slots = batch.step.meta.slots[index]
        for layer in self._kv:
            self._device.ops.scrub(layer, slots)
        for row in bad_rows.tolist():
            self._fail_row(step, int(batch.rows.place[row]), nan_logits())

    def _fail_row(self, step: LaunchedStep, place: int, error: ServingError) -> None:
        self.slots.failed[step.plan.row_slot[place]] = True
        step.failed[place] = error

    def _report_prompt(self, step: LaunchedStep) -> None:
        assert step.batch is not None and step.hidden is not None
        batch = step.batch
        for row, slot in enumerate(batch.rows.slot.tolist()):
            start, place = int(batch.rows.start[row]), int(batch.rows.place[row])
            if not self._prompt_logprobs.wants(slot, start) or place in step.failed:
                continue
            last = int(batch.last[row]) + 1
            piece = step.hidden[last - int(batch.rows.count[row]) : last]
            try:
                report = self._prompt_logprobs.report(place, slot, start, piece)
                step.result.prompt_logprobs.append(report)
            except ServingError as error:
                self._fail_row(step, place, error)

    def _sample(self, step: LaunchedStep, tokens: Tokens) -> None:
        """Fills in the tokens of the samples whose rows have not failed."""
        plan, slots = step.plan, self.slots
        failed = slots.failed[step.owners]
        if step.failed:  # then a failed row's other samples have no token either
            failed |= np.isin(plan.sample_row[step.samples], list(step.failed))
        kept = np.flatnonzero(~failed)
        if not len(kept):
            return
        samples, owner = step.samples[kept], step.owners[kept]
        if step.largest is not None:
            best, values = (found.cpu().numpy()[kept] for found in step.largest)
            chosen = self._sampler.take_largest(best, values)
        else:
            assert step.logits is not None
            logits = step.logits.cpu().numpy()
            if len(kept) < len(step.samples):
                logits = logits[kept]
            # The token to choose is counted in the length already.
            output = (slots.length[owner] - 1 - slots.prompt_len[owner]).astype(np.int64)
            chosen = self._sampler.sample(logits, owner, output)
        tokens[samples] = chosen.tokens
        for sample, error in chosen.failed.items():
            slots.failed[owner[sample]] = True
            step.failed[int(plan.sample_row[samples[sample]])] = error
        packed = self._sampler.pack_logprobs(plan.sample_slot.astype(np.int64), samples, chosen)
        step.result.logprobs, step.result.top_ids, step.result.top_logprobs = packed

    def _complete(self, step: LaunchedStep, tokens: Tokens) -> None:
        """Puts the tokens [computed samples] in the places that were kept for them; -1: there is none."""
        plan = step.plan
        row = plan.sample_row[step.samples]
        self.slots.fill_in(step.owners, plan.row_start[row] + plan.row_count[row], tokens)
        self._sampler.commit(step.owners, tokens)
