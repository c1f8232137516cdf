"""The largest step there can be, run once to see what memory it takes and to choose kernels."""

import numpy as np
import torch

from services.decoder.models.decoder_model import DecoderModel
from services.decoder.ops.base import BaseOps


def profile_run(
    model: DecoderModel, ops: BaseOps, max_tokens: int, max_slots: int, max_model_len: int
) -> None:
    """A step of `max_tokens` tokens in as few rows as that takes, every token an embedding of media,
    and logits for `max_slots` samples. The cache it writes is its own and is dropped."""
    longest = min(max_tokens, max_model_len)
    counts = [longest] * (max_tokens // longest)
    if max_tokens % longest:
        counts.append(max_tokens % longest)
    width = -(-longest // ops.block_size)
    blocks = np.arange(1, len(counts) * width + 1, dtype=np.int32).reshape(len(counts), width)
    kv = [ops.alloc_kv(model.kv_spec, blocks.size + 1) for _ in range(model.num_layers)]
    places = np.concatenate([np.arange(count) for count in counts])
    rows = np.repeat(np.arange(len(counts)), counts)
    slots = blocks[rows, places // ops.block_size].astype(np.int64) * ops.block_size
    axes = max(1, model.rotary_axes)
    with torch.inference_mode():
        meta = ops.make_meta(counts, counts, blocks, slots + places % ops.block_size)
        positions = torch.from_numpy(np.tile(places, (axes, 1))).to(ops.device)
        ids = torch.zeros(max_tokens, dtype=torch.int64, device=ops.device)
        media = torch.zeros((max_tokens, model.config.hidden_size)).to(ops.device, ops.dtype)
        hidden = model.embed(ids, [media], [(0, max_tokens)])
        hidden = model.forward(hidden, positions, meta, kv)
        samples = hidden[torch.arange(max_slots, device=ops.device) % max_tokens]
        model.logits(samples.contiguous())
