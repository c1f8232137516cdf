"""The largest logit by way of a sketch is the largest logit: the same token, the same bits."""

import pytest
import torch
from torch import Tensor

from services.decoder.devices.cpu import ops as cpu
from services.decoder.steps.attention_meta import Packed
from shared.cpu_kernels import binding, shortlist
from shared.weights.linear_weight import in_memory
from tests.support.decoder.instruction_sets import RUNNABLE, each, open_kernels

if not RUNNABLE:
    pytest.skip("there are no kernels for this processor", allow_module_level=True)
HIDDEN = 72
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(scope="module", params=each())
def kernels(request: pytest.FixtureRequest) -> binding.Kernels:
    return open_kernels(request.param)


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(shortlist, "LEAST_BYTES", 0)  # small weights are sketched too


class Head:
    """One weight, packed with a sketch and without."""

    def __init__(self, kernels: binding.Kernels, weight: Tensor, dtype: torch.dtype) -> None:
        self.ops = cpu.CpuOps(dtype, kernels)
        self.sketched, self.plain = (
            self.ops.pack_head(in_memory(weight)),
            self.ops.pack(in_memory(weight)),
        )

    def check(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """That both agree, in every row and for every number of rows; returns what they say."""
        x = x.to(self.ops.dtype)
        for rows in range(1, len(x) + 1):
            found = self._of(x[:rows], self.sketched)
            assert torch.equal(found, self._of(x[:rows], self.plain)), rows
        return self.ops.largest(x, self.sketched)

    def _of(self, x: Tensor, packed: Packed) -> Tensor:
        tokens, values = self.ops.largest(x, packed)
        return torch.stack([tokens, values.view(torch.int32)])


@TYPES
@pytest.mark.parametrize("shape", [(4000, HIDDEN), (1003, 70), (31, 5), (640, 1029)])
def test_any_weight(kernels: binding.Kernels, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    head = Head(kernels, torch.randn(shape), dtype)
    for _ in range(20):
        head.check(torch.randn(6, shape[1]))


@TYPES
def test_panels_that_cannot_win_are_not_read(kernels: binding.Kernels, dtype: torch.dtype) -> None:
    weight = torch.randn(4096, HIDDEN)
    head = Head(kernels, weight, dtype)
    x = weight[1234:1235].to(dtype)
    expected, _ = head.check(x)
    panel = 1234 // kernels.panel
    head.sketched.weight[:panel] = torch.nan
    head.sketched.weight[panel + 1 :] = torch.nan
    found, values = head.ops.largest(x, head.sketched)
    assert found.tolist() == expected.tolist() == [1234]
    assert values.isfinite().all()


@TYPES
def test_of_equal_rows_the_first(kernels: binding.Kernels, dtype: torch.dtype) -> None:
    few = torch.randn(7, HIDDEN)
    weight = few[torch.randint(7, (3000,))]
    tokens, _ = Head(kernels, weight, dtype).check(torch.randn(4, HIDDEN))
    assert all((weight[: int(token)] != weight[int(token)]).any(1).all() for token in tokens)


@TYPES
def test_differences_that_the_sketch_does_not_show(
    kernels: binding.Kernels, dtype: torch.dtype
) -> None:
    """Rows that differ in last places only; every panel has to be read, again and again."""
    row = torch.randn(1, HIDDEN)
    head = Head(kernels, row * (1 + torch.randn(2000, HIDDEN) * 2**-9), dtype)
    for _ in range(12):
        head.check(torch.randn(4, HIDDEN))
    head = Head(kernels, row.expand(2000, HIDDEN), dtype)
    for _ in range(5):
        head.check(torch.randn(4, HIDDEN))


@TYPES
def test_rows_that_the_sketch_puts_in_the_wrong_order(
    kernels: binding.Kernels, dtype: torch.dtype
) -> None:
    """By nearly as much as the bounds allow: the true largest loses almost half a step of the sketch in
    every place, another one wins as much."""
    signs = torch.randn(HIDDEN).sign()
    weight = torch.randn(2000, HIDDEN) / 8
    weight[:, 0] = 127  # a step is 1
    weight[700], weight[1500] = signs * (10 + 0.46875), signs * (10 + 0.53125)
    weight[[700, 1500], 0] = 127
    weight[700, 1] = signs[1] * 20
    x = signs[None].clone()
    x[:, 0] = 0
    tokens, _ = Head(kernels, weight, dtype).check(x)
    assert tokens.tolist() == [700]


@TYPES
def test_a_row_of_which_the_whole_numbers_lose_much(
    kernels: binding.Kernels, dtype: torch.dtype
) -> None:
    """Beside its largest element, almost half a step of the row is lost in every other place."""
    weight = torch.zeros(2000, HIDDEN)
    weight[700, 2:] = 1
    weight[1500, 1] = 1
    x = torch.full((1, HIDDEN), 0.46875)
    x[0, 0], x[0, 1] = 4096, 20
    tokens, _ = Head(kernels, weight, dtype).check(x)
    assert tokens.tolist() == [700]


def test_sums_whose_last_places_depend_on_their_order(kernels: binding.Kernels) -> None:
    """The sketch is exact here, the sums are not: what a panel's rows have more of is lost in the rounding."""
    x = torch.full((1, 1024), 8191.0)
    x[0, 0] = 64
    weight = torch.randint(100, 128, (1023,)).float()
    weight[0] = 127
    weight = torch.stack([weight[torch.randperm(1023)] for _ in range(2000)])
    more = torch.arange(2000) // kernels.panel % 4
    weight = torch.cat([more[:, None], weight], 1)
    tokens, _ = Head(kernels, weight, torch.float32).check(x)
    assert more[tokens] != 3, "rounding decides nothing here"


@TYPES
def test_rows_of_very_different_size(kernels: binding.Kernels, dtype: torch.dtype) -> None:
    size = 10 ** torch.empty(2000, 1).uniform_(-30, 15)
    weight = torch.randn(2000, HIDDEN) * size
    head = Head(kernels, weight, dtype)
    for power in (-35, -12, -8, 0, 8, 15, 20):
        head.check(torch.randn(4, HIDDEN) * 10.0**power)
    small = Head(kernels, weight[size[:, 0] < 1e-10], dtype)
    small.check(torch.randn(4, HIDDEN))


@TYPES
def test_columns_of_very_different_size(kernels: binding.Kernels, dtype: torch.dtype) -> None:
    weight = torch.randn(2000, HIDDEN)
    weight[:, 3] *= 1000
    x = torch.randn(4, HIDDEN)
    x[1:, 3] = 1e-4
    x[2:, 5] = 1e5
    Head(kernels, weight, dtype).check(x)


@TYPES
def test_all_logits_negative_or_zero(kernels: binding.Kernels, dtype: torch.dtype) -> None:
    weight = -torch.rand(1003, HIDDEN)
    tokens, values = Head(kernels, weight, dtype).check(torch.rand(4, HIDDEN))
    assert (values < 0).all()
    tokens, values = Head(kernels, weight, dtype).check(torch.zeros(2, HIDDEN))
    assert tokens.tolist() == values.tolist() == [0, 0]


@TYPES
def test_what_is_not_finite(kernels: binding.Kernels, dtype: torch.dtype) -> None:
    weight = torch.randn(2000, HIDDEN)
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = torch.randn(4, HIDDEN)
        x[2, 7] = bad
        Head(kernels, weight, dtype).check(x)
        spoilt = weight.clone()
        spoilt[900, 3] = bad
        _, values = Head(kernels, spoilt, dtype).check(torch.randn(4, HIDDEN))
        if bad != bad:
            assert values.isnan().all()
    huge = weight.clone()
    huge[3] = 3e38
    huge[4] = -3e38
    Head(kernels, huge, dtype).check(torch.randn(4, HIDDEN))
    Head(kernels, weight, dtype).check(torch.randn(4, HIDDEN) * 1e38)


def test_small_weights_and_many_rows_are_left_alone(
    kernels: binding.Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(200, HIDDEN)
    assert shortlist.make(kernels, weight) is not None
    monkeypatch.undo()
    assert shortlist.make(kernels, weight) is None
