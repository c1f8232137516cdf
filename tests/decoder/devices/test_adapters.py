"""Low-rank additions to linear layers: what they add, and to which rows alone."""

import pytest
import torch
from torch import Tensor

from services.decoder.devices.base.adapters import Segment
from services.decoder.devices.base.ops import BaseOps
from services.decoder.devices.cpu.ops import CpuOps
from services.decoder.loading.linear_weight import in_memory
from tests.support.decoder.instruction_sets import each, open_kernels

ROWS, INPUTS, INNER, RANK = 7, 41, 75, 5
FIRST, SECOND = [1, 2, 5], [0, 6]


@pytest.fixture(params=["base", *each()])
def ops(request: pytest.FixtureRequest) -> BaseOps:
    torch.manual_seed(3)
    if request.param == "base":
        return BaseOps(torch.device("cpu"), torch.float32)
    return CpuOps(torch.float32, open_kernels(request.param))


def segments(ops: BaseOps, outputs: int) -> list[tuple[list[int], Tensor, Tensor, Segment]]:
    """Of two adapters: rows, both matrices, and the same for the ops."""
    found = []
    for rows in (FIRST, SECOND):
        down, up = torch.randn(RANK, INPUTS), torch.randn(outputs, RANK) / 4
        packed = (ops.pack(in_memory(matrix)) for matrix in (down, up))
        found.append((rows, down, up, Segment(torch.tensor(rows), *packed)))
    return found


def added(
    x: Tensor, outputs: int, parts: list[tuple[list[int], Tensor, Tensor, Segment]]
) -> Tensor:
    out = torch.zeros(len(x), outputs)
    for rows, down, up, _ in parts:
        out[rows] = x[rows] @ down.T @ up.T
    return out


def test_rows_of_a_segment_gain_its_product_and_others_keep_their_bits(ops: BaseOps) -> None:
    weight, x = torch.randn(INNER, INPUTS), torch.randn(ROWS, INPUTS)
    parts = segments(ops, INNER)
    before = ops.linear(x, ops.pack(in_memory(weight)))
    after = before.clone()
    ops.adapt(x, after, [part[-1] for part in parts])
    torch.testing.assert_close(after, x @ weight.T + added(x, INNER, parts), rtol=1e-5, atol=1e-4)
    assert torch.equal(after[[3, 4]], before[[3, 4]])


def test_additions_to_gates_and_ups_come_before_the_activation(ops: BaseOps) -> None:
    weight, x = torch.randn(2 * INNER, INPUTS) / 4, torch.randn(ROWS, INPUTS)
    packed = ops.pack_gate_up(in_memory(weight))
    gates, ups = segments(ops, INNER), segments(ops, INNER)
    out = ops.gate_up_swiglu(x, packed, [part[-1] for part in gates], [part[-1] for part in ups])
    gate, up = (x @ weight.T).chunk(2, 1)
    gate, up = gate + added(x, INNER, gates), up + added(x, INNER, ups)
    torch.testing.assert_close(out, torch.nn.functional.silu(gate) * up, rtol=1e-4, atol=1e-4)
    if ops.row_invariant:
        assert torch.equal(out[[3, 4]], ops.gate_up_swiglu(x, packed)[[3, 4]])


def test_a_row_has_the_same_bits_alone_and_among_others(ops: BaseOps) -> None:
    if not ops.row_invariant:
        pytest.skip("torch promises no such thing")
    x = torch.randn(ROWS, INPUTS)
    packed = ops.pack_gate_up(in_memory(torch.randn(2 * INNER, INPUTS) / 4))
    [(_, _, _, gate), _], [(_, _, _, up), _] = segments(ops, INNER), segments(ops, INNER)
    whole = ops.gate_up_swiglu(x, packed, [gate], [up])
    for row in FIRST:
        alone = [Segment(torch.tensor([0]), part.down, part.up) for part in (gate, up)]
        assert torch.equal(
            ops.gate_up_swiglu(x[[row]], packed, alone[:1], alone[1:])[0], whole[row]
        )
