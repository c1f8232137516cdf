"""Steps over some prompts with a cache of their own, before there is a worker."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from services.decoder.devices.base.ops import BaseOps
from services.decoder.models.cache_spec import paged_layers
from services.decoder.models.decoder_model import DecoderModel
from services.decoder.steps.step import Step

Pieces = Sequence[Sequence[int]]  # of each prompt how many tokens each step computes


class TrialRun:
    """Blocks lie apart and backwards, so that none is where it would be by chance."""

    def __init__(
        self,
        decoder: DecoderModel,
        ops: BaseOps,
        prompts: Sequence[Sequence[int]],
        spans: list[tuple[int, int, int]] | None = None,
    ) -> None:
        """spans: see `AttnMeta.bidirectional`, of prompts that are computed whole."""
        self._spans = spans
        self._decoder, self._ops, self._prompts = decoder, ops, prompts
        width = -(-max(map(len, prompts)) // ops.block_size)
        count = len(prompts) * width
        self._tables = np.arange(count, 0, -1, dtype=np.int32).reshape(width, len(prompts)).T.copy()
        # Numbers, not codes: what is compared is whether it is the same model.
        self._caches = [
            ops.alloc_kv(replace(layer, coded=False, kept=()), count + 1)
            for layer in paged_layers(decoder.layers)
        ]
        # Of each step, which tokens of the batch are the first prompt's.
        self.first: list[slice] = []

    def logits(self, pieces: Pieces) -> list[Tensor]:
        """float32 [n, vocabulary] of each prompt."""
        done = [0] * len(self._prompts)
        found: list[list[Tensor]] = [[] for _ in self._prompts]
        for step in range(max(map(len, pieces))):
            counts = {p: some[step] for p, some in enumerate(pieces) if some[step:] and some[step]}
            rows = sorted(counts, key=lambda p: counts[p] != 1)
            logits, token = self._step(rows, counts, done), 0
            self.first.append(slice(0, 0))
            for p in rows:
                own = slice(token, token + counts[p])
                found[p].append(logits[own])
                done[p] += counts[p]
                token = own.stop
                if p == 0:
                    self.first[-1] = own
        return [torch.cat(some) for some in found]

    def _step(self, rows: Sequence[int], counts: dict[int, int], done: Sequence[int]) -> Tensor:
        ops, decoder = self._ops, self._decoder
        total = sum(counts[p] for p in rows)
        ids, places, written = np.zeros((3, ops.padded_rows(total)), np.int64)
        token = 0
        for p in rows:
            own = slice(token, token + counts[p])
            at = np.arange(done[p], done[p] + counts[p])
            ids[own], places[own] = self._prompts[p][at[0] : at[-1] + 1], at
            written[own] = self._tables[p, at // ops.block_size] * ops.block_size
            written[own] += at % ops.block_size
            token = own.stop
        sent = [
            torch.from_numpy(x).to(ops.device) for x in (ids, places, written, self._tables[rows])
        ]
        ends = [done[p] + counts[p] for p in rows]
        step = Step(
            ids=sent[0],
            positions=sent[1].expand(max(1, decoder.rotary_axes), -1),
            meta=ops.make_meta([counts[p] for p in rows], ends, sent[3], sent[2], self._spans),
            slots=rows,
        )
        hidden = decoder.forward(decoder.embed(step.ids, [], []), step, self._caches)
        return decoder.logits(hidden[:total])
