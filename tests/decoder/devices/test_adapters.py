"""Low-rank additions to linear layers, each with the rows that have it: what every device adds, and to these alone."""

from collections.abc import Callable, Iterator
from random import Random

import pytest
import torch
from torch import Tensor

from services.decoder.devices.base.adapters import (
    Addition,
    LayerLinears,
    Segment,
    require_rows,
)
from services.decoder.devices.base.ops import BaseOps
from services.decoder.devices.base.row_check import rows_are_equal
from services.decoder.devices.cpu.ops import CpuOps
from services.decoder.devices.cpu.torch_ops import TorchCpuOps
from services.decoder.devices.cuda.ops import CudaOps
from services.decoder.steps.attention_meta import Heads
from shared.errors import InvalidRequest
from shared.weights.linear_weight import LinearWeight, in_memory
from tests.support.decoder.adapted_layer import (
    COUNTS,
    NAMES,
    STACKED,
    TOKENS,
    Drawn,
    DrawnLayer,
    check_added,
    tokens_of,
)
from tests.support.decoder.instruction_sets import each, open_kernels

CPU = torch.device("cpu")
ALL = range(TOKENS)
# Two sequences of one token, and a part of a longer one.
SOME = (0, 2, 4, 5, 6, 9)

Make = Callable[[torch.dtype], BaseOps]

OWN = each(lambda known: lambda dtype: CpuOps(dtype, open_kernels(known)))
PLAIN = [
    pytest.param(lambda dtype, kind=kind: kind(CPU, dtype), id=kind.__name__)
    for kind in (TorchCpuOps, CudaOps)
]
TYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def layer() -> DrawnLayer:
    return DrawnLayer()


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def base(dtype: torch.dtype) -> BaseOps:
    return BaseOps(CPU, dtype)


def check(layer: DrawnLayer, make: Make, dtype: torch.dtype, drawn: list[Drawn]) -> None:
    """The device gives what the reference gives; rows of sequences without segments keep their bits."""
    ops = make(dtype)
    found = check_added(layer, ops, drawn, 1e-5 if dtype == torch.float32 else 0.04)
    if not ops.row_invariant:
        return
    rows = {row for one in drawn for row in one.rows}
    free = [tokens_of(i) for i in range(len(COUNTS)) if not rows & set(tokens_of(i))]
    kept = [token for tokens in free for token in tokens]
    assert torch.equal(found[:, kept], layer.run(ops, layer.packed(ops))[:, kept])


def drawn_subsets() -> Iterator[list[str]]:
    """Of the linear layers, single or stacked, one of each size but the first and the last."""
    random = Random(0)
    names = [*NAMES, *STACKED]
    for size in range(2, len(names) + 1):
        yield random.sample(names, size)


@pytest.mark.parametrize("name", [*NAMES, *STACKED])
def test_the_reference_adds_what_merged_weights_would(layer: DrawnLayer, name: str) -> None:
    plain, drawn = base(torch.float32), [Drawn.of(name, ALL, seed) for seed in (1, 2)]
    found = layer.run(plain, layer.packed(plain), drawn)
    expected = layer.run(plain, layer.packed(plain, drawn))
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("make", [*OWN, *PLAIN])
@pytest.mark.parametrize("name", [*NAMES, *STACKED])
def test_each_linear_layer_alone(
    layer: DrawnLayer, make: Make, dtype: torch.dtype, name: str
) -> None:
    check(layer, make, dtype, [Drawn.of(name, SOME, 1)])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("make", [*OWN, *PLAIN])
def test_any_linear_layers_together(layer: DrawnLayer, make: Make, dtype: torch.dtype) -> None:
    """Each with rows of its own."""
    random = Random(1)
    for names in drawn_subsets():
        drawn = [
            Drawn.of(name, sorted(random.sample(SOME, random.randint(1, 6))), seed)
            for seed, name in enumerate(names)
        ]
        check(layer, make, dtype, drawn)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("make", [*OWN, *PLAIN])
@pytest.mark.parametrize("name", [*NAMES, *STACKED])
def test_two_and_three_segments_of_a_row_add_up(
    layer: DrawnLayer, make: Make, dtype: torch.dtype, name: str
) -> None:
    """Rows of one, of two and of three of them, in ranges that lie apart."""
    rows = [(0, 1, 4, 5, 6), (0, 3, 4, 9), (0, 5, 9, 11)]
    check(layer, make, dtype, [Drawn.of(name, some, i, rank=4 + i) for i, some in enumerate(rows)])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("make", [*OWN, PLAIN[0]])
def test_a_row_has_the_same_bits_alone_and_among_others(
    layer: DrawnLayer, make: Make, dtype: torch.dtype
) -> None:
    """Each sequence by itself, with its own segments, and in a step with those of others."""
    ops = make(dtype)
    if not ops.row_invariant or not rows_are_equal(ops):
        pytest.skip("torch's library promises no such thing here")
    random = Random(2)
    packed = layer.packed(ops)
    for _ in range(4):
        drawn = [
            Drawn.of(name, sorted(random.sample(ALL, random.randint(1, TOKENS))), seed)
            for seed, name in enumerate(random.choices([*NAMES, *STACKED], k=7))
        ]
        whole = layer.run(ops, packed, drawn)
        for sequence in range(len(COUNTS)):
            alone = layer.run(ops, packed, drawn, [sequence])
            assert torch.equal(alone, whole[:, tokens_of(sequence)])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("make", OWN)
def test_gates_keep_their_bits_however_threads_divide_the_rows(
    make: Make, dtype: torch.dtype
) -> None:
    """Of as many numbers as torch divides among threads, wherever it cuts them."""
    torch.manual_seed(0)
    linears = LayerLinears(32, 1003, Heads(1, 1, 32))
    ops, x = make(dtype), torch.randn(401, 32).to(dtype)
    packed = ops.pack_gate_up(in_memory(torch.randn(2006, 32)))
    down, up = in_memory(torch.randn(8, 32)), in_memory(torch.randn(1003, 8))
    addition = ops.pack_addition(linears.place("gate_proj"), down, up)
    segments = [Segment(torch.arange(401), addition)]
    alone = ops.gate_up_swiglu(x, packed, segments)
    threads = torch.get_num_threads()
    try:
        for count in (2, 5, 7, 11):
            torch.set_num_threads(count)
            assert torch.equal(ops.gate_up_swiglu(x, packed, segments), alone)
    finally:
        torch.set_num_threads(threads)


def test_some_outputs_of_a_linear_layer(layer: DrawnLayer) -> None:
    ops = base(torch.float32)
    place = LayerLinears(96, 200, Heads(4, 2, 64)).place("up_proj").part(20, 70)
    down, up = torch.randn(3, 96), torch.randn(50, 3)
    addition = ops.pack_addition(place, in_memory(down), in_memory(up))
    x, out = torch.randn(5, 96), torch.zeros(5, 400)
    ops.adapt(x, out, [Segment(torch.tensor([1, 3]), addition)])
    expected = torch.zeros(5, 400)
    expected[[1, 3], 220:270] = x[[1, 3]] @ down.T @ up.T
    torch.testing.assert_close(out, expected)


LINEARS = LayerLinears(96, 200, Heads(4, 2, 64))


def zeros(*shape: int, bias: Tensor | None = None) -> LinearWeight:
    return in_memory(torch.zeros(*shape), bias, "x.lora")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: LINEARS.place("lm_head"), "no linear layer lm_head .* it has q_proj, k_proj"),
        (
            lambda: LINEARS.place("k_proj").part(64, 129),
            "outputs 64 to 129 of k_proj, which has 128",
        ),
        (lambda: LINEARS.place("k_proj").part(5, 5), "outputs 5 to 5"),
        (lambda: LINEARS.place("k_proj").part(-1, 5), "outputs -1 to 5"),
        (
            lambda: _addition("k_proj", zeros(4, 96), zeros(256, 4)),
            r"k_proj takes 96 inputs to 128 outputs; x.lora is \[4, 96\] and x.lora \[256, 4\]",
        ),
        (lambda: _addition("down_proj", zeros(4, 96), zeros(96, 4)), "down_proj takes 200 inputs"),
        (lambda: _addition("o_proj", zeros(4, 256), zeros(96, 5)), r"not \[rank, 256\]"),
        (
            lambda: _addition("o_proj", zeros(4, 256), zeros(96, 4, bias=torch.zeros(96))),
            "has a bias",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(make: Callable[[], object], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as error:
        make()
    assert error.value.reason == "BAD_ADAPTER"


def _addition(name: str, down: LinearWeight, up: LinearWeight) -> Addition:
    return base(torch.float32).pack_addition(LINEARS.place(name), down, up)


@pytest.mark.parametrize(
    "rows",
    [
        torch.tensor([2, 1]),
        torch.tensor([1, 1]),
        torch.tensor([-1, 1]),
        torch.tensor([[1]]),
        torch.tensor([1], dtype=torch.int32),
    ],
)
def test_rows_that_are_no_segments_are_refused(rows: Tensor) -> None:
    with pytest.raises(ValueError, match="rows of a segment"):
        require_rows(rows)
