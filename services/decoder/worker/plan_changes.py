"""What a plan changes before its rows run: sequences, their tables, blocks, and embeddings in use."""

from collections.abc import Sequence

import structlog

from services.decoder.devices.base.attention_meta import PagedKV
from services.decoder.devices.base.device import Device
from services.decoder.models.decoder_model import DecoderModel
from services.decoder.sampling.sampler import Sampler
from services.decoder.worker.media.embeddings import Embeddings
from services.decoder.worker.moves import apply_moves
from services.decoder.worker.plan import Plan
from services.decoder.worker.prompt_logprobs import PromptLogprobs
from services.decoder.worker.sealed_blocks import SealedBlocks
from services.decoder.worker.slots import SlotTable
from shared.errors import ServingError
from shared.telemetry.request_names import names
from tessera.decoder.v1.decoder_pb2 import NewSequence

log = structlog.get_logger(__name__)


class PlanChanges:
    """Applies plans to everything that the worker keeps of sequences."""

    def __init__(
        self,
        model: DecoderModel,
        device: Device,
        slots: SlotTable,
        sampler: Sampler,
        sealed: SealedBlocks,
        embeddings: Embeddings,
        prompt_logprobs: PromptLogprobs,
        kv: Sequence[PagedKV],
        host_kv: Sequence[PagedKV],
    ) -> None:
        """kv, host_kv: the caches of all layers, on the device and on the host."""
        self._model, self._device = model, device
        self._slots, self._sampler, self._sealed = slots, sampler, sealed
        self._embeddings, self._prompt_logprobs = embeddings, prompt_logprobs
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
            self._embeddings.use(span.digest for span in slots.media.get(child, ()))
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
        self._sampler.drop(slot)
        self._prompt_logprobs.drop(slot)
        media = self._slots.media.get(slot)
        if media:
            self._embeddings.unuse(span.digest for span in media)

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
            tokens = self._slots.introduce(sequence)
            self._embeddings.use(span.digest for span in self._slots.media.get(slot, ()))
            prompt, output = tokens[: sequence.prompt_len], tokens[sequence.prompt_len :]
            params = sequence.sampling
            self._sampler.introduce(slot, sequence.choice, params, prompt, output)
            self._slots.prefix_len[slot] = self._model.prefix(prompt)
            if self._model.rotary_axes:
                rotary = self._model.positions(prompt, sequence.media)
                self._slots.set_rotary(slot, *rotary)
        except ServingError as error:
            if error.reason == "INVALID_PLAN":
                raise
            self._slots.fail(slot, error)
            return
        if params.HasField("prompt_logprobs"):
            self._prompt_logprobs.introduce(slot, params.prompt_logprobs)
