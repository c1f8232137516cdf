"""Which steps CUDA graphs are made of. That they are captured and replayed is tested where there is a GPU."""

import pytest
import torch
from torch import Tensor

from services.decoder.devices.cuda.graphs import CudaGraphs
from services.decoder.devices.cuda.ops import CudaOps
from services.decoder.steps.step import Step


def make(block_size: int, width: int) -> tuple[CudaGraphs, list[tuple[int, int]]]:
    """Graphs, and of each step that is computed without one the rows, and the tokens that attention reads of a row."""
    computed: list[tuple[int, int]] = []

    def forward(step: Step) -> Tensor:
        assert step.meta.block_table.shape[1] * block_size == step.meta.max_kv
        computed.append((len(step.ids), step.meta.max_kv))
        return step.ids

    ops = CudaOps(torch.device("cpu"), torch.float32, block_size)
    return CudaGraphs(ops, forward, [1, 64, 256], 1, width), computed


def test_lengths_are_bounded_together_with_rows() -> None:
    graphs, computed = make(16, 8192 // 16)
    of_one, of_more = [(1, n) for n in (256, 1024, 4096, 8192)], [(64, 256), (64, 1024), (256, 256)]
    assert computed == of_one + of_more
    assert [graphs.longest(size) for size in graphs.sizes] == [8192, 1024, 256]


def test_rows_of_which_the_shortest_length_is_too_much_have_no_graph() -> None:
    graphs, computed = make(512, 1)
    assert computed == [(1, 512), (64, 512)]
    assert graphs.size_for(64) == 64 and graphs.size_for(65) is None


def test_longer_sequences_are_computed_without() -> None:
    graphs, computed = make(16, 8192 // 16)
    ops, longer = CudaOps(torch.device("cpu"), torch.float32, 16), 1040
    table = torch.zeros((64, longer // 16), dtype=torch.int32)
    ids = torch.ones(64, dtype=torch.int64)
    meta = ops.make_meta([1] * 64, [longer] * 64, table, ids)
    assert graphs.run(Step(ids=ids, positions=ids[None], meta=meta, slots=range(64))) is ids
    assert computed[-1] == (64, longer)


def test_where_attention_reads_what_rows_have_one_graph_is_for_all_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CudaOps, "reads_what_rows_have", True)
    graphs, computed = make(16, 8192 // 16)
    assert computed == [(1, 8192), (64, 8192), (256, 8192)]
    assert [graphs.longest(size) for size in graphs.sizes] == [8192] * 3
