"""Runs step plans, strictly in order. What a plan does depends on nothing but the plan and what the plans before it
left."""

from collections import deque
from collections.abc import Sequence
from concurrent import futures
from threading import Condition

import numpy as np
from torch import Tensor

from services.decoder.devices.base.device import Device
from services.decoder.devices.base.graphs import Graphs
from services.decoder.devices.base.staging import Array
from services.decoder.media.embeddings import Embeddings
from services.decoder.models.cache_spec import cache_spec
from services.decoder.models.decoder_model import DecoderModel
from services.decoder.ranks.rank_group import RankGroup
from services.decoder.sampling.logits_processors.token_masks import TokenMatcher
from services.decoder.speculation.proposer import Proposer
from services.decoder.steps.attention_meta import PagedKV
from services.decoder.steps.step import Step
from services.decoder.worker.collecting import Collecting, Deliver
from services.decoder.worker.computing import Computing
from services.decoder.worker.inputs.media_rows import reader
from services.decoder.worker.launched_step import LaunchedStep
from services.decoder.worker.plan_changes import PlanChanges
from services.decoder.worker.planned_adapters import PlannedAdapters
from services.decoder.worker.plans.plan import Limits, Plan, read_plan
from services.decoder.worker.pooling import Pooling
from services.decoder.worker.preparing import Preparing
from services.decoder.worker.prompt_logprobs import PromptLogprobs
from services.decoder.worker.recomputation import Recomputation
from services.decoder.worker.row_checks import RowChecks
from services.decoder.worker.slots.accepting import Accepting
from services.decoder.worker.slots.drafting import Drafting
from services.decoder.worker.slots.encoder_blocks import EncoderBlocks
from services.decoder.worker.slots.kept_by_slot import (
    LayerStates,
    MediaInUse,
    Preparations,
    PromptPlaces,
    SampledSlots,
)
from services.decoder.worker.slots.sealed_blocks import SealedBlocks
from services.decoder.worker.slots.slot_states import SlotStates
from services.decoder.worker.slots.slots import PENDING, SlotTable
from services.decoder.worker.token_choice import TokenChoice
from shared.environment import monotonic
from shared.telemetry.logs import Stopwatch
from tessera.decoder.v1.decoder_pb2 import StepPlan, StepResult, StepTimes


class Worker:
    """The decoder's whole state: slots, sampler, cache; one object for each process.

    One thread launches. Where the device computes beside the host another one collects, at most one step behind.
    """

    def __init__(
        self,
        model: DecoderModel,
        device: Device,
        limits: Limits,
        embeddings: Embeddings,
        matcher: TokenMatcher | None = None,
        adapters: PlannedAdapters | None = None,
        proposer: Proposer | None = None,
        max_drafts: int = 0,
    ) -> None:
        """Allocates the cache: `limits.num_blocks` on the device, touched. matcher: of grammars, which are refused
        without one. adapters: those that plans load; none may be loaded unless given. proposer: guesses up to
        `max_drafts` tokens of a row where plans leave it to the decoder; without one none are guessed."""
        self.limits = limits
        self.embeddings = embeddings
        self.adapters = adapters or PlannedAdapters(model.drop_adapter)
        self._model = model
        self._device, ops = device, device.ops
        spec = cache_spec(model.layers)
        self._kv = [ops.alloc_kv(layer, limits.num_blocks) for layer in spec.paged]
        host_kv = [ops.alloc_host_kv(layer, limits.num_host_blocks) for layer in spec.paged]
        states = SlotStates(spec.states, ops, limits.max_slots)
        vocabulary = model.config.vocab_size
        self.slots = slots = SlotTable(
            limits.max_slots,
            limits.max_model_len,
            limits.block_size,
            vocabulary,
            model.rotary_axes,
            model.media_ids,
            model.adapters,
        )
        encoder = EncoderBlocks(spec.encoder, ops, limits.num_encoder_blocks, slots, model)
        self.sealed = SealedBlocks(limits.num_blocks)
        sampler = device.make_sampler(limits.max_slots, vocabulary, matcher)
        logprobs = PromptLogprobs(model, slots)
        # What is added by slot is introduced, forked and dropped here; the table itself comes first.
        kept = (
            LayerStates(states),
            encoder,
            MediaInUse(slots, embeddings),
            SampledSlots(sampler),
            PromptPlaces(slots, model),
            logprobs,
            accepting := Accepting(),
            drafting := Drafting(slots, proposer, max_drafts),
            pooling := Pooling(model),
        )
        self._drafting = drafting
        self._preparations = Preparations(kept)
        self._changes = PlanChanges(
            device, slots, kept, self.sealed, embeddings, self.adapters, self._kv, host_kv
        )
        read = reader(embeddings, model.config.hidden_size * (1 + model.levels))
        self._checks = RowChecks(slots, read, states, encoder)
        choice = TokenChoice(model, device, slots, sampler)
        self._collecting = Collecting(
            ops, slots, sampler, choice, accepting, logprobs, pooling, embeddings, self._kv
        )
        self._recomputation = Recomputation(model, device, slots, read, self._kv, encoder)
        self._preparing = Preparing(
            model, device, slots, states, encoder, self.sealed, choice, logprobs, pooling, read
        )
        # Guards all of the state above but the device's. Steps that were launched and not collected, oldest first.
        self._collected = Condition()
        self._computing = Computing(
            model,
            device,
            self.forward,
            self._preparing,
            choice,
            pooling,
            self._collecting,
            self._collected,
        )
        self._in_flight: deque[LaunchedStep] = deque()
        self._arrived_at = 0.0  # when the step that was collected last was computed
        # A row failed or has to be computed again: what is in flight is collected before the next launch.
        self._is_draining = False
        self._has_failed = False  # some row, since the last reset

    @property
    def max_drafts(self) -> int:
        """Most drafts that it puts into a row by itself."""
        return self._drafting.most

    @property
    def caches(self) -> Sequence[PagedKV]:
        """Of each layer that has one."""
        return self._kv

    def reset(self) -> None:
        """Forgets all sequences, once all steps are collected; sealed blocks, embeddings and adapters stay.

        The scheduler hashes blocks once it has their tokens, several at a time; the remaining ones are hashed here.
        After a failed row nothing is added: only the scheduler knows which blocks depend on it.
        """
        with self._collected:
            self._collected.wait_for(lambda: not self._in_flight)
            if not self._has_failed:
                self.sealed.complete(self.slots)
            self._has_failed = self._is_draining = False
            for slot in np.flatnonzero(self.slots.known).tolist():
                self._changes.forget(slot)
            self.slots.clear()
            self.embeddings.forget_sequences()
            self.adapters.settle()

    def accept(self, message: StepPlan) -> Plan:
        """A plan that is to be launched later, checked for its form. What it fetches is pulled from now on, and what
        takes long of its new sequences is prepared: called on the event loop. Raises as `read_plan` does."""
        plan = read_plan(message, self.limits)
        plan.prepared = [self._preparations.begin(sequence) for sequence in plan.new]
        for ref in plan.fetch:
            self.embeddings.start(ref)
        plan.reading = [self.adapters.begin(message) for message in plan.load_adapters]
        return plan

    @property
    def model(self) -> DecoderModel:
        """What it runs."""
        return self._model

    @property
    def graphs(self) -> Graphs | None:
        """Of `forward`, for steps that only generate; None where these run as all others do."""
        return self._preparing.graphs

    @graphs.setter
    def graphs(self, graphs: Graphs | None) -> None:
        self._preparing.graphs = graphs

    def forward(
        self, step: Step, embeds: Sequence[Tensor] = (), runs: Sequence[tuple[int, int]] = ()
    ) -> Tensor:
        """Hidden rows [T, H] of a step, by the model over this worker's cache."""
        hidden = self._model.embed(step.ids, embeds, runs)
        return self._model.forward(hidden, step, self._kv)

    @property
    def device(self) -> Device:
        """Where it computes."""
        return self._device

    @property
    def ranks(self) -> RankGroup | None:
        """The ranks that compute the model together; None where this process does alone."""
        return self._device.ops.ranks

    def step(self, plan: Plan, deliver: Deliver, queue_us: int = 0) -> None:
        """Launches a plan, collects it and hands over its result."""
        self.collect(self.launch(plan, queue_us), deliver)

    def launch(self, plan: Plan, queue_us: int = 0) -> LaunchedStep:
        """Applies a plan and submits its computation; waits for nothing on the device.

        Histories are as long afterwards as they will be, the new tokens PENDING: the next step reads them on the
        device. Waits until another thread has collected the step before it where this one cannot do without. Raises
        InvalidRequest for a plan that contradicts the decoder's state; the stream is then of no use any more.
        """
        step = LaunchedStep(
            plan,
            StepResult(lease=plan.lease, step=plan.step),
            Stopwatch(),
            StepTimes(queue_us=queue_us),
        )
        try:
            with self._collected:
                if self._in_flight:
                    self._collected.wait_for(lambda: not self._must_wait(plan))
                    step.times.queue_us += step.watch.lap_us()
                    for earlier in self._in_flight:
                        earlier.dropped.update(plan.drop.tolist())
                self._drafting.complete(plan)
                self._apply(plan)
                rows = self._checks.runnable(step)
                if len(rows.slot):
                    step.batch = self._preparing.prepare(step, rows)
                self._in_flight.append(step)
            step.times.prepare_us = step.watch.lap_us()
            if step.batch is not None:
                self._computing.run(step)
        except BaseException as error:
            self._has_failed = True
            self._remove(step)
            self._device.explain(error)
            raise
        return step

    def collect(self, step: LaunchedStep, deliver: Deliver) -> None:
        """Waits for a step, the oldest that was launched, hands over its result, and completes the histories of its
        sequences then, while the result is on its way.
        """
        try:
            arrived = step.download.wait() if step.download is not None else []
            # Until then the device was computing the step before.
            step.times.queue_us += step.watch.skip_to(self._arrived_at)
            self._arrived_at = monotonic()
            if step.late:
                futures.wait(step.late)
            with self._collected:
                self._finish(step, arrived, deliver)
        except BaseException as error:
            self._has_failed = True
            self._device.explain(error)
            raise
        finally:
            self._remove(step)

    def _remove(self, step: LaunchedStep) -> None:
        """A step is in flight no longer, if it was."""
        with self._collected:
            if step in self._in_flight:
                self._in_flight.remove(step)
            if not self._in_flight:
                self._is_draining = False
            self._collected.notify_all()

    def _apply(self, plan: Plan) -> None:
        """Called with the lock held, in the order of all plans and collected steps, as `_finish` is."""
        self._changes.apply(plan)

    def _finish(self, step: LaunchedStep, arrived: Sequence[Array], deliver: Deliver) -> None:
        later = list(self._in_flight)[1:]
        if step.redo:
            arrived = self._recomputation.run(step, arrived)
        self._collecting.finish(step, arrived, later, deliver)
        self._has_failed |= bool(step.failed)
        self._is_draining = bool(step.failed) or any(after.redo for after in later)

    def _must_wait(self, plan: Plan) -> bool:
        """Whether a step in flight has to be collected before a plan is applied."""
        if not self._in_flight:
            return False
        if len(self._in_flight) > 1 or self._is_draining:
            return True
        if plan.unload_adapters:  # a row in flight that is computed again may need them
            return True
        if self._in_flight[-1].must_precede(plan):
            return True
        slots = self.slots
        drafted = plan.row_slot[np.flatnonzero(plan.row_drafts)]
        touched = np.concatenate([plan.fork_parent, plan.set_token_slot, plan.draft_slot, drafted])
        last = slots.tokens[touched, np.maximum(slots.length[touched] - 1, 0)]
        return bool((last == PENDING).any())
