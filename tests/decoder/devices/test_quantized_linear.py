"""Products with codes on the CPU: bits of whole numbers, whatever is beside a row, and what is quantized when it is
loaded."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from services.decoder.devices.base.adapters import Segment
from services.decoder.devices.base.ops import BaseOps
from services.decoder.devices.base.row_check import rows_are_equal
from services.decoder.devices.cpu.ops import CpuOps
from shared.cpu_kernels.instruction_sets import InstructionSet
from shared.errors import InvalidRequest
from shared.weights.linear_weight import StackedWeight, as_codes, in_memory
from shared.weights.on_the_fly import quantize
from shared.weights.scheme import HEAD, SCHEMES, Scheme
from tests.support.decoder.adapted_layer import Drawn
from tests.support.decoder.coded_weights import FORMS, Form
from tests.support.decoder.instruction_sets import RUNNABLE, each, open_kernels
from tests.support.decoder.integer_reference import coded_linear

CPU = torch.device("cpu")
if not RUNNABLE:
    pytest.skip("there are no kernels for this processor", allow_module_level=True)

Make = Callable[[torch.dtype, Scheme | None], CpuOps]


def _own(known: InstructionSet) -> Make:
    def make(dtype: torch.dtype, scheme: Scheme | None = None) -> CpuOps:
        ops = CpuOps(dtype, open_kernels(known, 2))
        ops.scheme = scheme
        return ops

    return make


@pytest.fixture(params=each(_own))
def make(request: pytest.FixtureRequest) -> Any:
    return request.param


def _rows(rows: int, inputs: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("digits", [1, 2])
def test_every_form_of_codes_gives_the_bits_of_whole_numbers(
    make: Make, dtype: torch.dtype, digits: int
) -> None:
    ops = make(dtype, replace(HEAD, digits=digits))
    x = _rows(9, 136, dtype)  # with groups of 32, 64 and 128 the last one is short
    for form in [*FORMS, Form(group=20), Form(bits=4, group=20, zeros=True)]:
        codes = form.make(70, 136)
        bias = torch.linspace(-1, 1, 70)
        found = ops.linear_float32(x, ops.pack(as_codes(codes, bias)))
        assert torch.equal(found, coded_linear(x, codes, digits) + bias), str(form)


# As GGUF's blocks of Q5_0, Q5_K, Q6_K, Q4_K and IQ4_XS.
@pytest.mark.parametrize(
    ("form", "bits"),
    [
        (Form(group=32, scales=torch.float16, used_bits=5), 5.5),
        (Form(group=32, minima=True, scales=torch.float16, used_bits=5, run=8), 5.625),
        (Form(group=16, scales=torch.float16, used_bits=6, run=16), 6.5625),
        (Form(bits=4, group=32, minima=True, scales=torch.float16, run=8), 4.625),
        (Form(bits=4, group=32, codebook=True, scales=torch.float16, run=8), 4.3125),
    ],
    ids=str,
)
def test_codes_and_scales_lie_in_as_many_bits_as_they_have(
    make: Make, form: Form, bits: float
) -> None:
    ops = make(torch.float32, None)
    ops.pack(as_codes(form.make(64, 1024)))
    assert 8 * ops.coded_bytes == bits * 64 * 1024


def test_codes_of_every_form_stay_codes_in_every_pack(make: Make) -> None:
    """Also cut, put in order, stacked and filled up with zeros."""
    ops = make(torch.float32, None)
    x = _rows(5, 256, torch.float32)
    for form in FORMS:
        weight = as_codes(form.make(64, 256), torch.linspace(-1, 1, 64))
        moved = weight.reordered([*range(32, 64), *range(32)]).shard("out", [(0, 16), (32, 48)])
        stack = StackedWeight([moved, moved]).spread("out", range(64), 72)
        codes = stack.quantized()
        assert codes is not None and stack.bias is not None
        sums = coded_linear(x, codes, 2) + stack.bias
        before = ops.coded_layers
        assert torch.equal(ops.linear(x, ops.pack(stack)), sums), str(form)
        assert torch.equal(ops.linear_float32(x, ops.pack_head(stack)), sums), str(form)
        gelu = ops.linear_gelu(x, ops.pack_gelu(stack))
        torch.testing.assert_close(gelu, F.gelu(sums, approximate="tanh"))
        gate, up = sums.chunk(2, 1)
        gated = ops.gate_up_swiglu(x, ops.pack_gate_up(stack))
        torch.testing.assert_close(gated, F.silu(gate) * up)
        assert ops.coded_layers == before + 4


def test_codes_that_no_kernel_multiplies_are_packed_as_numbers(make: Make) -> None:
    ops = make(torch.float32, None)
    table = Form(bits=4, group=64, codebook=True).make(32, 64)
    assert table.codebook is not None
    wide = replace(table, codebook=tuple(3 * number for number in table.codebook))
    ours = ops.pack(as_codes(wide))
    x = _rows(3, 64, torch.float32)
    expected = ops.linear(x, ops.pack(in_memory(wide.dequantize(torch.float32))))
    assert torch.equal(ops.linear(x, ours), expected) and ops.coded_layers == 0


@pytest.mark.parametrize("name", SCHEMES)
def test_a_scheme_quantizes_what_is_packed(make: Make, name: str) -> None:
    ops, plain = make(torch.float32, SCHEMES[name]), BaseOps(CPU, torch.float32)
    weight = in_memory(torch.randn(96, 320, generator=torch.Generator().manual_seed(0)) / 18)
    codes = quantize(weight, SCHEMES[name])
    x = _rows(6, 320, torch.float32)
    found = ops.linear(x, ops.pack(weight))
    assert torch.equal(found, coded_linear(x, codes, SCHEMES[name].digits))
    off = (found - plain.linear(x, plain.pack(weight))).norm() / found.norm()
    assert off < (0.15 if "int4" in name else 0.02)
    head = coded_linear(x, quantize(weight, HEAD), 2)
    assert torch.equal(ops.linear_float32(x, ops.pack_head(weight)), head)
    values, places = head.max(1)
    for ours, right in zip(ops.largest(x, ops.pack_head(weight)), (places, values), strict=True):
        assert torch.equal(ours.to(right.dtype), right)
    assert ops.sketched_rows(ops.pack_head(weight)) == 0
    assert rows_are_equal(ops)


def test_what_is_quantized_is_nearest(make: Make) -> None:
    drawn = torch.randn(7, 200, generator=torch.Generator().manual_seed(0))
    drawn[3] = 0
    drawn[4] = -drawn[4].abs()
    for scheme in SCHEMES.values():
        near = quantize(in_memory(drawn), scheme).dequantize(torch.float32)
        group = scheme.group or 200
        for first in range(0, 200, group):
            part, found = drawn[:, first : first + group], near[:, first : first + group]
            least, most = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            step = part.abs().amax(1) / 127 if scheme.bits == 8 else (most - least) / 15
            assert (
                (part - found).abs() <= step[:, None] * (0.51 if scheme.bits == 8 else 0.6)
            ).all()
        assert (near[3] == 0).all()


def test_weights_that_cannot_be_quantized_are_named() -> None:
    broken = torch.ones(4, 8)
    broken[2, 3] = float("nan")
    for scheme in (SCHEMES["int8"], SCHEMES["int4"]):
        with pytest.raises(
            InvalidRequest, match=r"layers\.7\.down .*cannot be quantized: .*no number"
        ):
            quantize(in_memory(broken, name="layers.7.down"), scheme)
    with pytest.raises(InvalidRequest, match=r"odd.*even number of inputs"):
        quantize(in_memory(torch.ones(4, 7), name="odd"), SCHEMES["int4"])


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_adapters_are_added_to_layers_of_codes(make: Make, name: str) -> None:
    """As numbers, and the rows beside them keep their bits."""
    ops = make(torch.float32, SCHEMES[name])
    weight = in_memory(torch.randn(400, 96, generator=torch.Generator().manual_seed(0)) / 10)
    x = _rows(6, 96, torch.float32)
    packed = ops.pack_gate_up(weight)
    sums = coded_linear(x, quantize(weight, SCHEMES[name]), SCHEMES[name].digits)
    drawn = Drawn.of("up_proj", (1, 4), seed=3)
    rows = torch.tensor(drawn.rows)
    found = ops.gate_up_swiglu(x, packed, [Segment(rows, drawn.packed(ops))])
    gate, up = sums.chunk(2, 1)
    up = up.clone()
    up[rows] += x[rows] @ drawn.down.T @ drawn.up.T
    torch.testing.assert_close(found, F.silu(gate) * up, rtol=1e-4, atol=1e-5)
    others = torch.tensor([0, 2, 3, 5])
    assert torch.equal(found[others], ops.gate_up_swiglu(x, packed)[others])
