"""Experts, whose tokens' results do not depend on the batch, and routers in the form of a device."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from services.decoder.devices.base.experts import ExpertLayer, Router
from services.decoder.devices.base.ops import BaseOps
from services.decoder.devices.cpu.device import CpuDevice
from services.decoder.models.generic.routers import replace_routers
from shared.weights.linear_weight import LinearWeight, in_memory

EXPERTS, HIDDEN, INNER, CHOSEN = 6, 32, 16, 2


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def swiglu(rows: Tensor) -> Tensor:
    first, second = rows.chunk(2, -1)
    return F.silu(first) * second


LAYER = ExpertLayer(EXPERTS, HIDDEN, 2 * INNER, INNER, False, swiglu, is_swiglu=True)


def weights(seed: int, out: int, inputs: int) -> list[LinearWeight]:
    return [in_memory(draw(seed + expert, out, inputs) * 0.2) for expert in range(EXPERTS)]


def test_a_token_is_the_sum_of_its_experts_shares_whatever_the_batch() -> None:
    ops = CpuDevice(torch.float32, threads=1).ops
    up, down = weights(10, 2 * INNER, HIDDEN), weights(20, HIDDEN, INNER)
    packed = ops.pack_experts(LAYER, iter(up), iter(down))
    x, shares = draw(0, 5, HIDDEN), draw(1, 5, CHOSEN).abs()
    index = torch.tensor([[0, 3], [3, 1], [5, 0], [2, 4], [3, 5]])
    found = ops.experts(x, index, shares, packed)
    for row in range(5):
        expected = sum(
            share
            * (swiglu(x[row] @ up[one].dense(torch.float32).T) @ down[one].dense(torch.float32).T)
            for one, share in zip(index[row].tolist(), shares[row], strict=True)
        )
        assert torch.allclose(found[row], torch.as_tensor(expected), atol=1e-5)
        rows = slice(row, row + 1)
        assert torch.equal(ops.experts(x[rows], index[rows], shares[rows], packed)[0], found[row])


def test_an_index_beyond_the_experts_is_no_expert() -> None:
    ops = BaseOps(torch.device("cpu"), torch.float32)
    packed = ops.pack_experts(LAYER, weights(10, 2 * INNER, HIDDEN), weights(20, HIDDEN, INNER))
    x, shares = draw(0, 2, HIDDEN), torch.ones(2, CHOSEN)
    found = ops.experts(x, torch.tensor([[EXPERTS, EXPERTS], [1, EXPERTS]]), shares, packed)
    assert not found[0].any() and found[1].any()


class PlainRouter(nn.Module):
    """As several classes have it: the largest of a softmax, made to sum up to 1 or times a factor."""

    def __init__(self, is_normed: bool = False, factor: float = 1.0) -> None:
        super().__init__()
        self.top_k, self.is_normed, self.routed_scaling_factor = CHOSEN, is_normed, factor
        self.weight = nn.Parameter(draw(3, EXPERTS, HIDDEN))

    def shares(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden.reshape(-1, HIDDEN), self.weight)
        shares, index = self.shares(logits).topk(self.top_k)
        if self.is_normed:
            shares = shares / shares.sum(-1, keepdim=True)
        return logits, shares * self.routed_scaling_factor, index


class SigmoidRouter(PlainRouter):
    def shares(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()


class ChoosingOps(BaseOps):
    """Has an operation that chooses, and counts its calls."""

    calls = 0

    def router(self, count: int, k: int) -> Router | None:
        def choose(logits: Tensor) -> tuple[Tensor, Tensor]:
            ChoosingOps.calls += 1
            shares, index = logits.softmax(-1).topk(k)
            return shares, index.int()

        return choose


@pytest.mark.parametrize(
    ("router", "is_replaced"),
    [
        (PlainRouter(), True),
        (PlainRouter(is_normed=True), True),
        (PlainRouter(factor=2.5), True),
        (SigmoidRouter(), False),
        (SigmoidRouter(is_normed=True), False),
    ],
)
@torch.inference_mode()
def test_a_router_that_chooses_otherwise_stays_the_classs_own(
    router: PlainRouter, is_replaced: bool
) -> None:
    x = draw(7, 9, HIDDEN)
    expected = router(x)
    ops = ChoosingOps(torch.device("cpu"), torch.float32)
    assert replace_routers(nn.Sequential(router), ops) == is_replaced
    ChoosingOps.calls = 0
    found = router(x)
    assert ChoosingOps.calls == is_replaced
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours.float(), theirs.float(), atol=1e-6)


@torch.inference_mode()
def test_a_device_without_an_operation_leaves_every_router() -> None:
    router = PlainRouter()
    assert not replace_routers(nn.Sequential(router), BaseOps(torch.device("cpu"), torch.float32))
