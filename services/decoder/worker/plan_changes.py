"""What a plan changes before its rows run: sequences, their tables, blocks, and embeddings in use."""

from collections.abc import Sequence
from itertools import repeat

import structlog

from services.decoder.devices.base.device import Device
from services.decoder.media.embeddings import Embeddings
from services.decoder.steps.attention_meta import PagedKV
from services.decoder.worker.planned_adapters import PlannedAdapters
from services.decoder.worker.plans.moves import apply_moves
from services.decoder.worker.plans.plan import Plan, Prepared
from services.decoder.worker.slots.kept_by_slot import Introduced, KeptBySlot
from services.decoder.worker.slots.sealed_blocks import SealedBlocks
from services.decoder.worker.slots.slots import SlotTable
from shared.errors import ServingError
from shared.telemetry.request_names import names
from tessera.decoder.v1.decoder_pb2 import NewSequence

log = structlog.get_logger(__name__)


class PlanChanges:
    """Applies plans to everything that the worker keeps of sequences."""

    def __init__(
        self,
        device: Device,
        slots: SlotTable,
        kept: Sequence[KeptBySlot],
        sealed: SealedBlocks,
        embeddings: Embeddings,
        adapters: PlannedAdapters,
        kv: Sequence[PagedKV],
        host_kv: Sequence[PagedKV],
    ) -> None:
        """kept: whatever else is kept by slot, in the order in which it is introduced; kv, host_kv: the caches of all
        layers with blocks, on the device and on the host."""
        self._device, self._slots, self._kept = device, slots, kept
        self._sealed, self._embeddings = sealed, embeddings
        self._adapters = adapters
        self._kv, self._host_kv = kv, host_kv

    def apply(self, plan: Plan) -> None:
        """Everything but the rows, in the order of the contract. Raises InvalidRequest for a plan that contradicts what
        is known."""
        slots = self._slots
        self._embeddings.hold([bytes(ref.digest) for ref in plan.fetch])
        self._sealed.seal(plan.sealed_blocks, plan.sealed_hashes)
        if len(plan.drop):
            for slot in plan.drop.tolist():
                self.forget(slot)
            slots.drop(plan.drop)
        self._adapters.apply(plan)
        for sequence, prepared in zip(plan.new, plan.prepared or repeat({}), strict=False):
            self._introduce(sequence, prepared)
        for child, parent, choice in zip(
            plan.fork_child.tolist(),
            plan.fork_parent.tolist(),
            plan.fork_choice.tolist(),
            strict=True,
        ):
            slots.fork(child, parent, choice)
            for kept in self._kept:
                kept.fork(child, parent, choice)
        slots.set_last_tokens(plan.set_token_slot, plan.set_token)
        if len(plan.edit_slot):
            slots.edit_tables(plan)
        apply_moves(plan, self._device, self._kv, self._host_kv)
        self._sealed.overwrite(plan.copy_dst)
        self._sealed.overwrite(plan.swap_in_device)
        if plan.release:
            self._embeddings.release(bytes(digest) for digest in plan.release)

    def forget(self, slot: int) -> None:
        """Drops what is kept of a slot beside the table of slots."""
        for kept in self._kept:
            kept.drop(slot)

    def _introduce(self, sequence: NewSequence, prepared: Prepared) -> None:
        slot = sequence.slot
        log.debug(
            "sequence introduced",
            **names(sequence.request_id, sequence.client_request_id, sequence.traceparent),
            choice=sequence.choice,
            slot=slot,
            prompt_tokens=sequence.prompt_len,
            known_tokens=len(sequence.tokens) // 4,
            media=len(sequence.media),
        )
        try:
            self._adapters.finish(sequence.lora_id)
            tokens = self._slots.introduce(sequence)
            for kept in self._kept:
                kept.introduce(slot, Introduced(sequence, tokens, prepared.get(kept)))
        except ServingError as error:
            if error.reason == "INVALID_PLAN":
                raise
            self._slots.fail(slot, error)
