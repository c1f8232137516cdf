"""Graphs on the simulated device: what is captured runs at each replay, with the lengths of the last update."""

import pytest
import torch
import torch_npu
from torch import Tensor
from torch_npu import npu

from tests.ascend.simulator.counters import counted, synchronisations
from tests.ascend.simulator.errors import Refused
from tests.ascend.support import random

BLOCK, HEADS, SIZE = 128, 2, 64
MASK = torch.triu(torch.ones(2048, 2048), 1).to(torch.int8)


def test_a_replay_computes_from_what_the_inputs_hold_then() -> None:
    x, w = torch.zeros(4, 8, device="npu"), random(8, 8, dtype=torch.float32).to("npu")
    total = torch.zeros(8, device="npu")
    graph = npu.NPUGraph()
    with npu.graph(graph):
        y = torch.relu(x @ w) + 1
        total.add_(y.sum(0))
    assert y.cpu().isnan().all()
    assert not total.cpu().any()  # nothing has run yet
    expected = torch.zeros(8)
    for seed in range(2):
        x.copy_(random(4, 8, seed=seed, dtype=torch.float32))
        with counted() as cost:
            graph.replay()
        expected += (torch.relu(x.cpu() @ w.cpu()) + 1).sum(0)
        assert torch.equal(y.cpu(), torch.relu(x.cpu() @ w.cpu()) + 1)
        assert (cost["replay"], synchronisations(cost)) == (1, 0)
    assert torch.equal(total.cpu(), expected)


@pytest.mark.parametrize(
    "read", [lambda x: x.sum().item(), lambda x: x.cpu(), lambda x: x.nonzero(), lambda x: x[x > 0]]
)
def test_what_waits_for_the_host_cannot_be_captured(read: object) -> None:
    x, graph = torch.ones(4, device="npu"), npu.NPUGraph()
    with pytest.raises(Refused, match="captured"), npu.graph(graph):
        read(x)  # type: ignore[operator]


class Attention:
    """A captured call of FIA over a paged cache of one sequence."""

    def __init__(self, captured: int) -> None:
        self.query = random(1, HEADS, SIZE).to("npu")
        self.cache = random(4, BLOCK, HEADS * SIZE, seed=1).to("npu")
        self.table = torch.arange(4, dtype=torch.int32, device="npu")[None]
        self.mask = MASK.to("npu")
        self.graph = npu.NPUGraph()
        with npu.graph(self.graph, auto_dispatch_capture=True):
            self.out = self.attend(captured) * 2

    def attend(self, length: int) -> Tensor:
        out: Tensor = torch_npu.npu_fused_infer_attention_score(
            self.query,
            self.cache,
            self.cache,
            atten_mask=self.mask,
            actual_seq_lengths=[1],
            actual_seq_lengths_kv=[length],
            block_table=self.table,
            num_heads=HEADS,
            num_key_value_heads=HEADS,
            scale=0.2,
            input_layout="TND",
            sparse_mode=3,
            block_size=BLOCK,
        )[0]
        return out


def test_lengths_are_those_of_the_last_update() -> None:
    attention = Attention(captured=1)
    for length in (7, 130, 512):
        attention.graph.update([{"actual_seq_lengths_kv": [length]}])
        attention.graph.replay()
        assert torch.equal(attention.out.cpu(), (attention.attend(length) * 2).cpu())


def test_an_update_may_follow_the_replay() -> None:
    attention = Attention(captured=1)
    attention.graph.replay()
    attention.graph.update([{"actual_seq_lengths_kv": [300]}])
    assert torch.equal(attention.out.cpu(), (attention.attend(300) * 2).cpu())


def test_a_replay_without_an_update_hangs_and_is_reported() -> None:
    attention = Attention(captured=1)
    attention.graph.update([{"actual_seq_lengths_kv": [5]}])
    attention.graph.replay()
    attention.out.cpu()
    attention.graph.replay()
    with pytest.raises(Refused, match="hang"):
        attention.out.cpu()


def test_an_update_comes_behind_the_replay_before() -> None:
    """Else that one may still read the lengths, or go on by the event of the next one."""
    attention = Attention(captured=1)
    updates = attention.graph.graph_dispatch_mode.update_stream
    for length in (5, 200):
        updates.wait_stream(npu.current_stream())
        attention.graph.update([{"actual_seq_lengths_kv": [length]}])
        attention.graph.replay()
    with pytest.raises(RuntimeError, match="may still run"):
        attention.graph.update([{"actual_seq_lengths_kv": [7]}])
    assert torch.equal(attention.out.cpu(), (attention.attend(200) * 2).cpu())
