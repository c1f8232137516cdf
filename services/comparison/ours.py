"""What Tessera's own parts make of a prepared prompt: encoder and decoder of one checkpoint, in one process."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.comparison.prepared import Prepared
from services.decoder.devices.cpu.device import CpuDevice
from services.decoder.media.media_spans import MediaSpan
from services.decoder.models.cache_spec import cache_spec, paged_layers
from services.decoder.models.decoder_model import DecoderModel
from services.decoder.worker.inputs.rows import Rows
from services.decoder.worker.inputs.step_inputs import Inputs
from services.decoder.worker.slots.encoder_blocks import EncoderBlocks
from services.decoder.worker.slots.kept_by_slot import Introduced
from services.decoder.worker.slots.slots import SlotTable
from services.families import registry
from services.families.family import is_generic, load_part
from services.vision_encoder.devices.cpu.device import CpuDevice as EncoderDevice
from services.vision_encoder.embedding_producer import item_of
from services.vision_encoder.loading import load_encoder
from shared.checkpoint.folder import Checkpoint
from shared.model_backends import ModelBackend
from tessera.decoder.v1.decoder_pb2 import NewSequence

_THREADS = 1


def load_decoder(
    checkpoint: Checkpoint, backend: ModelBackend, trust_remote_code: bool, longest: int
) -> DecoderModel:
    """As a decoder loads it on a CPU in float32. Raises InvalidRequest for one that is not served."""
    ops = CpuDevice(torch.float32, threads=_THREADS).ops
    family = registry.find_decoder(checkpoint, backend)
    load = load_part(family.decoder).load
    more = {"trust_remote_code": trust_remote_code} if is_generic(family.decoder) else {}
    model: DecoderModel = load(checkpoint, ops, longest, **more)
    spec = cache_spec(model.layers)
    if spec.states:
        paged_layers(model.layers)  # refuses them
    return model


@torch.inference_mode()
def encode(checkpoint: Checkpoint, prompts: list[Prepared]) -> list[dict[bytes, Tensor]]:
    """Of each prompt the rows of its items [rows, width] by their digests. Raises InvalidRequest for an encoder that is
    not served."""
    encoder = load_encoder(checkpoint, EncoderDevice(torch.float32, _THREADS))
    assert encoder is not None
    found = []
    for prompt in prompts:
        made = zip(prompt.items, prompt.pixels, strict=True)
        items = [item_of(item, pixels) for item, pixels in made]
        rows = [encoder.encode([item])[0] for item in items]
        digests = [bytes(item.digest) for item in prompt.items]
        found.append(dict(zip(digests, map(torch.as_tensor, rows), strict=True)))
    return found


@dataclass(frozen=True)
class Whole:
    """A decoder, and the device that its checkpoint was loaded on."""

    model: DecoderModel
    device: CpuDevice

    @torch.inference_mode()
    def logits(self, prompt: Prepared, rows: dict[bytes, Tensor], asked: Tensor) -> Tensor:
        """float32 [n, vocabulary] of a prompt in one step, of its tokens at `asked` [n]."""
        count, size, model = len(prompt.ids), self.device.block_size, self.model
        spec = cache_spec(model.layers)
        vocabulary = model.config.vocab_size
        slots = SlotTable(1, count, size, vocabulary, model.rotary_axes, model.media_ids)
        ids = prompt.ids.astype("<i4").tobytes()
        sequence = NewSequence(slot=0, prompt_len=count, tokens=ids, media=prompt.items)
        tokens = slots.introduce(sequence)
        rows_in_all = sum(item.rows for item in prompt.items)
        encoder = EncoderBlocks(
            spec.encoder, self.device.ops, -(-rows_in_all // size), slots, model
        )
        encoder.introduce(0, Introduced(sequence, tokens))
        slots.prefix_len[0] = model.prefix(tokens)
        if model.rotary_axes:
            slots.set_rotary(0, *model.positions(tokens, prompt.items))
        blocks = -(-count // size)
        slots.table[0] = np.arange(1, blocks + 1)
        caches = [self.device.ops.alloc_kv(layer, blocks + 1) for layer in spec.paged]

        def read(span: MediaSpan, low: int, high: int) -> Tensor:
            return rows[span.digest][low:high]

        def one(value: int) -> Any:
            return np.array([value], np.int64)

        inputs = Inputs(
            slots, self.device, read, model.levels, model.needs.attention, encoder=encoder
        )
        whole = Rows(one(0), one(0), one(0), one(count))
        batch = inputs.build(whole, one(count), new_media=encoder.advance(whole.slot))
        hidden = model.embed(batch.step.ids, batch.embeds, batch.runs)
        last = model.forward(hidden, batch.step, caches)
        return model.logits(last[:count][asked])
