"""What `tessera doctor --npu` tries beyond single operators: attention as it is served, over long contexts and in steps
of many rows, graphs that are replayed with other lengths, and the choice of tokens."""

from collections.abc import Iterator, Sequence
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from services.decoder.devices.base.graphs import Graphs
from services.decoder.devices.base.ops import BaseOps
from services.decoder.devices.npu.attention.coded_cache import CodedKV
from services.decoder.devices.npu.device import NpuDevice
from services.decoder.devices.npu.trials.telling_batch import TellingBatch
from services.decoder.sampling.device_sampler import Draws, draw, largest
from services.decoder.sampling.truncation import Truncation
from services.decoder.steps.attention_meta import KVSpec, PagedKV
from services.decoder.steps.step import Step
from shared.hardware.operation_check import Case

# Heads of queries, of keys, and the size of each: one head of keys is what a rank of several may have.
_LONG_HEADS = ((4, 2, 128), (4, 1, 128))
_LONG_ROWS = ((1, 4097), (1, 701), (400, 2500))  # queries and keys of each

_GRAPH_HEADS = (8, 2, 128)
_GRAPH_LENGTHS = (5, 130, 300, 700)  # of the rows of a replay; those of the capture are 1
_GRAPH_BLOCKS = 6
_TOLERANCES = {torch.float16: 0.02, torch.bfloat16: 0.1}

_SAMPLES, _VOCABULARY = 32, 32_000
_LIKELY = 40  # tokens that can be drawn; the others are too far below them


class StepCases:
    """Of one device; values are the same each time."""

    def __init__(self, device: NpuDevice) -> None:
        self._device, self._ops = device, device.ops
        self._generator = torch.Generator().manual_seed(0)

    def __iter__(self) -> Iterator[Case]:
        for heads in _LONG_HEADS:
            yield self._long_attention(heads)
        if not self._ops.is_310p:
            yield self._attention_to_codes(_LONG_HEADS[0])
        if self._device.has_graphs:
            yield _GraphCase(self._device, self._generator).case()
        yield from self._choices()

    def _long_attention(self, heads: tuple[int, int, int]) -> Case:
        ops = self._ops
        batch = TellingBatch.draw(ops.dtype, ops.block_size, heads, rows=_LONG_ROWS)
        kv = _on_device(ops, batch.kv, heads)
        meta = ops.make_meta(
            [count for count, _ in _LONG_ROWS],
            batch.call.kv_lens,
            batch.call.table.to(ops.device),
            torch.zeros(len(batch.q), dtype=torch.int32, device=ops.device),
        )
        q = batch.q.to(ops.device)

        def run() -> Sequence[Tensor]:
            return (ops.paged_attention(q, q, q, kv, meta, scale=batch.scale),)

        num_q, num_kv, size = heads
        rows = "; ".join(f"{count} of {keys}" for count, keys in _LONG_ROWS)
        nbytes = 2 * batch.q.nbytes + 2 * sum(keys for _, keys in _LONG_ROWS) * num_kv * size * 2
        return Case(
            f"attention of a step, {num_q}/{num_kv} heads of {size}",
            run,
            [batch.expected()],
            nbytes,
            batch.tolerance,
            f"tokens of contexts: {rows}",
        )

    def _attention_to_codes(self, heads: tuple[int, int, int]) -> Case:
        """Of single queries by the kernel, of others by numbers, out of blocks that were moved."""
        ops, (_, num_kv, size) = self._ops, heads
        batch = TellingBatch.draw(ops.dtype, ops.block_size, heads, rows=_LONG_ROWS)
        blocks = len(batch.kv.k)
        spec = KVSpec(num_kv, size, size, ops.dtype, coded=True)
        kv = ops.alloc_kv(spec, 2 * blocks)
        assert isinstance(kv, CodedKV)
        k, v = (part.flatten(0, 1).to(ops.device) for part in (batch.kv.k, batch.kv.v))
        slots = torch.arange(len(k), dtype=torch.int32).to(ops.device)
        ops.write_codes(k, v, kv, slots, kv.places(slots))
        moved = torch.arange(blocks)
        ops.copy_blocks(kv, moved.to(ops.device), (moved + blocks).to(ops.device))
        ops.scrub(kv, slots)
        numbers = kv.on_host().numbers(moved + blocks)
        meta = ops.make_meta(
            [count for count, _ in _LONG_ROWS],
            batch.call.kv_lens,
            (batch.call.table + blocks).to(ops.device),
            torch.zeros(len(batch.q), dtype=torch.int32, device=ops.device),
        )
        q = batch.q.to(ops.device)

        def run() -> Sequence[Tensor]:
            return (ops.paged_attention(q, q, q, kv, meta, scale=batch.scale),)

        return Case(
            f"attention of a step to keys and values of 8 bits, {heads[0]}/{num_kv} heads of {size}",
            run,
            [batch.with_numbers(*numbers).expected()],
            2 * batch.q.nbytes + 2 * sum(keys for _, keys in _LONG_ROWS) * num_kv * size,
            batch.tolerance,
        )

    def _choices(self) -> Iterator[Case]:
        logits = torch.full((_SAMPLES, _VOCABULARY), -30.0)
        for row in logits:
            ids = torch.randperm(_VOCABULARY, generator=self._generator)[:_LIKELY]
            row[ids] = 8 - 0.25 * torch.arange(_LIKELY)
        here = logits.to(self._ops.device)
        yield Case(
            f"largest of {_VOCABULARY} logits",
            partial(largest, here),
            largest(logits),
            logits.nbytes,
            0.0,
        )
        packed = torch.from_numpy(_draws().packed())
        yield Case(
            f"a token drawn of {_VOCABULARY}",
            partial(draw, here, packed.to(self._ops.device)),
            draw(logits, packed),
            logits.nbytes,
            0.0,
        )


def _draws() -> Draws:
    """Every kind of setting, and the largest logit in every fourth row."""
    samples = np.arange(_SAMPLES)
    settings = Truncation(
        np.where(samples % 4 == 3, 0.0, 0.7 + 0.05 * (samples % 8)).astype(np.float32),
        np.where(samples % 4 == 1, 20, 0).astype(np.int32),
        np.where(samples % 4 == 2, 0.9, 1.0),
        np.where(samples % 8 == 1, 0.05, 0.0),
    )
    return Draws(settings, np.random.default_rng(0).random(_SAMPLES))


class _GraphCase:
    """Attention of rows of one token, captured and replayed with lengths that differ from those of the capture."""

    def __init__(self, device: NpuDevice, generator: torch.Generator) -> None:
        self._device, self._ops = device, device.ops
        num_q, num_kv, size = _GRAPH_HEADS
        dtype, block_size = device.ops.dtype, device.block_size
        self._plain = BaseOps(torch.device("cpu"), dtype, block_size)
        rows = len(_GRAPH_LENGTHS)
        self._q = torch.randn(rows, num_q, size, generator=generator).to(dtype)
        self._kv = self._plain.alloc_kv(KVSpec(num_kv, size, size, dtype), _GRAPH_BLOCKS + 1)
        for part in (self._kv.k, self._kv.v):
            part.copy_(torch.randn(part.shape, generator=generator).to(dtype))
        self._table = torch.arange(1, _GRAPH_BLOCKS + 1, dtype=torch.int32).expand(rows, -1)

    def case(self) -> Case:
        """The last row of `_GRAPH_LENGTHS` has several blocks."""
        ops, rows = self._ops, len(_GRAPH_LENGTHS)
        expected = self._attend(self._plain, self._q, self._kv, self._step(self._plain))
        step = self._step(ops)

        def run() -> Sequence[Tensor]:
            return (self._graphs.run(step),)

        return Case(
            f"a graph of {rows} rows, replayed with other lengths",
            run,
            [expected],
            2 * self._q.nbytes,
            _TOLERANCES[ops.dtype],
        )

    @cached_property
    def _graphs(self) -> Graphs:
        ops = self._ops
        table, kv = self._q.to(ops.device), _on_device(ops, self._kv, _GRAPH_HEADS)

        def forward(step: Step) -> Tensor:
            return self._attend(ops, table.index_select(0, step.ids), kv, step)

        graphs = self._device.make_graphs(forward, [len(self._q)], 1, _GRAPH_BLOCKS)
        graphs.capture()
        return graphs

    def _step(self, ops: BaseOps) -> Step:
        rows = len(_GRAPH_LENGTHS)
        slots = torch.arange(rows, device=ops.device)
        table = self._table.contiguous().to(ops.device)
        meta = ops.make_meta([1] * rows, list(_GRAPH_LENGTHS), table, slots)
        ids = torch.arange(rows, device=ops.device)
        return Step(ids, ids[None], meta, range(rows))

    @staticmethod
    def _attend(ops: BaseOps, q: Tensor, kv: PagedKV, step: Step) -> Tensor:
        found = ops.paged_attention(q, q, q, kv, step.meta, scale=q.shape[-1] ** -0.5)
        return found.flatten(1)


def _on_device(ops: BaseOps, kv: PagedKV, heads: tuple[int, int, int]) -> PagedKV:
    """A cache in the layout of the device with the blocks of one on the host."""
    _, num_kv, size = heads
    made = ops.alloc_kv(KVSpec(num_kv, size, size, ops.dtype), len(kv.k))
    for block in range(len(kv.k)):
        ops.import_block(made, block, kv.k[block], kv.v[block])
    return made
