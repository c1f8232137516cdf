"""CUDA graphs of steps of one token a row. Where torch attends, a graph reads as many tokens of each row as it was
captured for, and hides what lies beyond the row's own: there are graphs for several lengths, and steps that none suits
are called. Where kernels read what rows have there is one graph for all."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from services.decoder.devices.base.graphs import Forward, Graphs, blank_step
from services.decoder.devices.cuda.ops import CudaOps
from services.decoder.steps.step import Step

_SHORTEST = 256  # tokens
_FACTOR = 4  # from one length to the next
# Tokens that a graph's attention reads, rows by length: beyond that the reading takes the time, and not the calls.
_MOST_TOKENS = 1 << 16


class CudaGraphs(Graphs):
    """All graphs share the memory of their intermediate results: one runs at a time."""

    def __init__(
        self, ops: CudaOps, forward: Forward, sizes: Sequence[int], axes: int, width: int
    ) -> None:
        """axes: of rotary positions; width: blocks in a row of the table. Computes a step of each graph: what libraries
        prepare when they are first used cannot be captured."""
        self._forward, self._block_size = forward, ops.block_size
        # What the graphs read, by rows and blocks in ascending order: at every replay the same memory with other
        # content.
        lengths = [width] if ops.reads_what_rows_have else _lengths(width, ops.block_size)
        self._inputs = {
            (size, blocks): _longest_step(ops, size, axes, blocks)
            for size in sizes
            for blocks in lengths
            if ops.reads_what_rows_have or size * blocks * ops.block_size <= _MOST_TOKENS
        }
        super().__init__(sorted({size for size, _ in self._inputs}))
        self._captured: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        for step in self._inputs.values():
            forward(step)

    def longest(self, size: int) -> int:
        """See `Graphs.longest`."""
        return max(blocks * self._block_size for rows, blocks in self._inputs if rows == size)

    def capture(self) -> None:
        """See `Graphs.capture`; those that read most first, whose memory suffices for the others."""
        pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize()
        for size, blocks in sorted(self._inputs, key=lambda key: -key[0] * key[1]):
            graph = torch.cuda.CUDAGraph()
            # Other threads may copy meanwhile.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                hidden = self._forward(self._inputs[size, blocks])
            self._captured[size, blocks] = graph, hidden

    def run(self, step: Step) -> Tensor:
        """See `Graphs.run`. Waits for nothing."""
        size, most = len(step.ids), -(-max(step.meta.kv_lens) // self._block_size)
        key = next((k for k in self._inputs if k[0] == size and k[1] >= most), None)
        if key is None:
            return self._forward(step)
        given, table = self._inputs[key], step.meta.block_table
        given.ids.copy_(step.ids)
        given.positions.copy_(step.positions)
        given.meta.slots.copy_(step.meta.slots)
        # What lies beyond in either is of no row's own.
        blocks = min(key[1], table.shape[1])
        given.meta.block_table[:, :blocks].copy_(table[:, :blocks])
        given.meta.device_state["lengths"].copy_(step.meta.device_state["lengths"])
        graph, hidden = self._captured[key]
        graph.replay()
        return hidden


def _lengths(width: int, block_size: int) -> list[int]:
    """In blocks, up to `width`."""
    found, blocks = [], -(-_SHORTEST // block_size)
    while blocks < width:
        found.append(blocks)
        blocks *= _FACTOR
    return [*found, width]


def _longest_step(ops: CudaOps, rows: int, axes: int, blocks: int) -> Step:
    """A blank step whose attention reads so many blocks of each row."""
    step = blank_step(ops, rows, axes, blocks)
    lengths, meta = [blocks * ops.block_size] * rows, step.meta
    return replace(step, meta=ops.make_meta([1] * rows, lengths, meta.block_table, meta.slots))
