"""Graphs by torch_npu. Lengths are arguments of the host to the attention kernel: a graph keeps those of its capture
until it is told others, and a graph that is told none stands still."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch_npu
from torch import Tensor

from services.decoder.devices.base.graphs import Forward, Graphs, blank_step
from services.decoder.devices.base.ops import BaseOps
from services.decoder.steps.step import Step


@dataclass(frozen=True)
class _Captured:
    graph: Any  # torch.npu.NPUGraph
    updates: Any  # the stream on which it is told lengths
    hidden: Tensor  # [T, H], in the memory of the graphs


class NpuGraphs(Graphs):
    """All graphs share the memory of their intermediate results: one runs at a time."""

    def __init__(
        self, ops: BaseOps, forward: Forward, sizes: Sequence[int], axes: int, width: int
    ) -> None:
        """axes: of rotary positions; width: blocks in a row of the table. Computes a step of each size: what libraries
        prepare when they are first used cannot be captured."""
        super().__init__(sizes)
        self._forward = forward
        # What the graphs read: at every replay the same memory with other content.
        self._inputs = {size: blank_step(ops, size, axes, width) for size in sizes}
        self._captured: dict[int, _Captured] = {}
        for step in self._inputs.values():
            forward(step)

    def capture(self) -> None:
        """See `Graphs.capture`; the largest first, whose memory suffices for the others."""
        pool, stream = torch_npu.npu.graph_pool_handle(), torch_npu.npu.Stream()
        torch_npu.npu.synchronize()
        torch_npu.npu.empty_cache()
        for size in reversed(self.sizes):
            graph = torch_npu.npu.NPUGraph()
            with _capturing(graph, pool, stream):
                hidden = self._forward(self._inputs[size])
            updates = graph.graph_dispatch_mode.update_stream
            self._captured[size] = _Captured(graph, updates, hidden)
        torch_npu.npu.synchronize()

    def run(self, step: Step) -> Tensor:
        """See `Graphs.run`. Waits for nothing."""
        size = len(step.ids)
        given, captured = self._inputs[size], self._captured[size]
        table = step.meta.block_table
        given.ids.copy_(step.ids)
        given.positions.copy_(step.positions)
        given.meta.slots.copy_(step.meta.slots)
        # Shorter than what is captured; nobody reads the rest.
        given.meta.block_table[:, : table.shape[1]].copy_(table)
        steps = torch_npu.npu.current_stream()
        # The graph may still run for the step before: its lengths change behind that.
        captured.updates.wait_stream(steps)
        captured.graph.update([{"actual_seq_lengths_kv": step.meta.kv_lens}])
        captured.graph.replay()
        steps.wait_stream(captured.updates)  # as the graph does, unseen by torch_npu's sanitizer
        return captured.hidden


@contextmanager
def _capturing(graph: Any, pool: object, stream: Any) -> Iterator[None]:
    """`torch.npu.graph(graph, pool=pool, stream=stream, auto_dispatch_capture=True)`, which after a failure would leave
    the thread on the stream of the capture."""
    graph.auto_dispatch_capture = True
    with torch_npu.npu.stream(stream), graph.graph_dispatch_mode:
        graph.capture_begin(pool=pool)
        try:
            yield
        finally:
            graph.capture_end()
