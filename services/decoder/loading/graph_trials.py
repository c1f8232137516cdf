"""Steps on which a graph that does not follow its inputs gives something else than calls do."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from services.decoder.devices.base.device import Device
from services.decoder.devices.base.graphs import blank_step
from services.decoder.models.cache_spec import cache_spec
from services.decoder.models.decoder_model import DecoderModel
from services.decoder.steps.step import Step
from services.decoder.worker.worker import Worker

_FIRST = 1  # the block that all but a row's last block are


class Trials:
    """Of a worker that has computed nothing yet: its cache is used, and zero again afterwards."""

    def __init__(self, model: DecoderModel, device: Device, worker: Worker) -> None:
        self.device, self.call, self._worker = device, worker.forward, worker
        self._specs = cache_spec(model.layers).paged
        self._axes, self._vocabulary = max(1, model.rotary_axes), model.config.vocab_size
        # The block that a row ends in; there are two beside block 0 unless all sequences have one.
        self._last = min(2, worker.limits.num_blocks - 1)

    def steps(self, size: int, longest: int | None = None) -> Iterator[Step]:
        """Steps of `size` rows that have other ids and lengths than the captured one: within a block, beyond it, and as
        long as a sequence may become, or `longest` tokens where that is less."""
        ops, width = self.device.ops, self._worker.slots.table.shape[1]
        blank = blank_step(ops, size, self._axes, width)
        ids = torch.arange(size, device=ops.device) % self._vocabulary
        seen: list[list[int]] = []
        for lengths in self._lengths(size, longest):
            if lengths in seen:
                continue
            seen.append(lengths)
            table = torch.full((size, width), _FIRST, dtype=torch.int32)
            ends = (torch.tensor(lengths) - 1) // self.device.block_size
            table[torch.arange(size), ends] = self._last
            meta = ops.make_meta([1] * size, lengths, table.to(ops.device), blank.meta.slots)
            yield replace(blank, ids=ids, meta=meta)

    def _lengths(self, size: int, longest: int | None) -> Iterator[list[int]]:
        block, most = self.device.block_size, self._worker.limits.max_model_len
        most = most if longest is None else min(most, longest)
        yield [min(most, 2 + row % (block - 1)) for row in range(size)]
        yield [min(most, block + 2 + row) for row in range(size)]
        yield [most] * size

    @contextmanager
    def filled_cache(self) -> Iterator[None]:
        """Meanwhile the mean of the values that a row sees depends on all of its length: they lie below zero, but for
        those of the last block, which weigh as much as all blocks before it."""
        width = self._worker.slots.table.shape[1]
        self._fill({_FIRST: -1.0, self._last: float(width)})
        try:
            yield
        finally:
            for kv in self._worker.caches:
                for block in {_FIRST, self._last}:
                    self.device.ops.scrub(kv, self._slots(block))

    def _fill(self, scales: dict[int, float]) -> None:
        ops, generator = self.device.ops, torch.Generator().manual_seed(0)
        count = self.device.block_size
        table = torch.zeros((1, 1), dtype=torch.int32, device=ops.device)
        metas = {
            block: ops.make_meta([count], [count], table, self._slots(block)) for block in scales
        }
        for kv, spec in zip(self._worker.caches, self._specs, strict=True):
            for block, scale in scales.items():
                keys, values = (
                    torch.rand((count, spec.num_kv_heads, size), generator=generator)
                    for size in (spec.k_size, spec.v_size)
                )
                k, v = (part.to(ops.device, ops.dtype) for part in (keys, values * scale))
                ops.kv_write(k, v, kv, metas[block])

    def _slots(self, block: int) -> torch.Tensor:
        first = block * self.device.block_size
        return torch.arange(first, first + self.device.block_size).to(self.device.ops.device)
