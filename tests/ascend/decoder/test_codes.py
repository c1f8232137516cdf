"""On an NPU weights of codes are multiplied as they are where an operator takes them, else as the numbers they mean."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch_npu
from structlog.testing import capture_logs
from torch import Tensor

from services.decoder.devices.base.ops import BaseOps
from services.decoder.devices.npu.device import NpuDevice
from services.decoder.devices.npu.ops import NpuOps
from services.decoder.devices.npu.weights import coded_linear
from services.decoder.devices.npu.weights.coded_linear import CodedLinear
from shared.weights.linear_weight import LinearWeight, StackedWeight, as_codes
from tests.ascend.environment import npu_environment
from tests.ascend.support import largest_difference, random, run_python
from tests.support.decoder.coded_weights import FORMS, Form

OUT, INPUTS = 64, 256
TOLERANCES = {torch.float16: 0.005, torch.bfloat16: 0.04}


@pytest.fixture(autouse=True)
def _nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def stays_codes(form: Form) -> bool:
    """By op-plugin's documents."""
    return not (form.minima or form.codebook or form.group % 32)


def expected(weight: LinearWeight, x: Tensor, dtype: torch.dtype) -> Tensor:
    """By the reference, which has the numbers in this type."""
    base = BaseOps(torch.device("cpu"), dtype)
    return base.linear(x.to(dtype), base.pack(weight)).float()


def require_products(ops: NpuOps, weight: LinearWeight) -> CodedLinear | None:
    """Those of the reference but for roundings; the weight as it was packed, where it has stayed codes."""
    x = random(5, weight.inputs, dtype=ops.dtype)
    packed = ops.pack(weight)
    found = ops.linear(x.to("npu"), packed).cpu()
    assert found.dtype == ops.dtype
    wanted = expected(weight, x, ops.dtype)
    assert (found.float() - wanted).abs().max() < TOLERANCES[ops.dtype] * wanted.abs().max()
    return packed if isinstance(packed, CodedLinear) else None


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_products_are_those_of_the_reference(form: Form, dtype: torch.dtype) -> None:
    ops = NpuDevice(dtype).ops
    weight = as_codes(form.make(OUT, INPUTS), torch.linspace(-1, 1, OUT))
    for other in (weight, as_codes(form.make(OUT, INPUTS))):
        packed = require_products(ops, other)
        assert (packed is not None) == stays_codes(form)
        if packed is None:
            continue
        assert packed.pieces[0].codes.dtype == (torch.int8 if form.bits == 8 else torch.int32)
        assert packed.num_bytes < OUT * INPUTS * 2
    moved = weight.reordered([*range(32, 64), *range(32)]).shard("out", [(0, 16), (32, 48)])
    require_products(ops, StackedWeight([moved, moved]).spread("out", range(64), 72))
    require_products(ops, weight.shard("in", [(64, 192)]))
    for count in (0, 70):
        x = random(count, INPUTS, dtype=dtype).to("npu")
        assert ops.linear(x, ops.pack(weight)).shape == (count, OUT)


def test_what_an_operator_does_not_take_becomes_numbers_and_is_said_once() -> None:
    ops = NpuDevice(torch.float16).ops
    with capture_logs() as logs:
        for form in FORMS:
            ops.pack(as_codes(form.make(OUT, INPUTS), name=str(form)))
            ops.pack(as_codes(form.make(OUT, INPUTS), name=str(form)))
    said = [line for line in logs if line["event"] == "quantized weights become float16"]
    assert {line["reason"].partition(",")[0] for line in said} == {
        "its groups have a minimum",
        "its codes are places in a table",
        "its groups of 16 inputs are no multiple of 32",
    }
    assert len(said) == 3
    assert ops.coded_layers == 2 * sum(map(stays_codes, FORMS))


@pytest.mark.parametrize(
    ("out", "inputs", "forms", "layout"),
    [
        (64, 64, "", "weight_quant"),
        (64, 64, "-weight_quant", "weight_quant_t"),
        (60, 64, "", "weight_quant_t"),  # outputs do not fill words
        (64, 60, "", "weight_quant"),
        (60, 60, "", None),
        (64, 64, "reference", None),
    ],
)
def test_codes_of_4_bits_lie_in_words(
    out: int, inputs: int, forms: str, layout: str | None
) -> None:
    ops = NpuDevice(torch.float16, forms=forms).ops
    packed = require_products(ops, as_codes(Form(bits=4, zeros=True).make(out, inputs)))
    assert (packed.form.layout if packed else None) == layout


@pytest.mark.parametrize("bits", [4, 8])
def test_a_wide_matrix_is_multiplied_in_pieces(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    monkeypatch.setattr(coded_linear, "_LARGEST_SIDE", 200)
    monkeypatch.setattr(coded_linear, "_MOST_AT_ONCE", 1)
    ops = NpuDevice(torch.float16).ops
    bias = torch.linspace(-1, 1, 456)
    packed = require_products(
        ops, as_codes(Form(bits=bits, group=32, zeros=True).make(456, 96), bias)
    )
    assert packed is not None
    assert [piece.scales.shape[1] for piece in packed.pieces] == [192, 192, 72]
    x = random(3, 96).to("npu")
    index, values = ops.largest(x, packed)
    logits = ops.linear_float32(x, packed)
    assert torch.equal(index.cpu(), logits.cpu().argmax(-1))
    assert torch.equal(values.cpu(), logits.cpu().amax(-1))


def test_an_operator_that_gives_other_products_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = torch_npu.npu_weight_quant_batchmatmul

    def without_offset(*given: object, antiquant_offset: object, **options: object) -> Tensor:
        found: Tensor = kernel(*given, antiquant_offset=None, **options)
        return found

    monkeypatch.setattr(torch_npu, "npu_weight_quant_batchmatmul", without_offset)
    ops = NpuDevice(torch.float16).ops
    with capture_logs() as logs:
        assert require_products(ops, as_codes(Form(group=32, zeros=True).make(OUT, INPUTS))) is None
        assert require_products(ops, as_codes(Form(group=32).make(OUT, INPUTS))) is not None
    [line] = [line for line in logs if line["event"] == "quantized weights become float16"]
    assert line["reason"] == "no operator multiplies with such codes here"


STEP, ZERO = 0.025, 5  # of activations, some of which are larger than the last whole number


def with_fixed_steps(dtype: torch.dtype, bias: Tensor | None) -> tuple[LinearWeight, Tensor]:
    """A weight whose activations have one step for all, and what it is of those of `rows`, by whole numbers."""
    codes = replace(Form(bits=8).make(OUT, INPUTS), activations=8, fixed=(STEP, ZERO))
    whole = (rows(dtype).double() / STEP).round().add(ZERO).clamp(-128, 127) - ZERO
    expected = whole * STEP @ codes.dequantize(torch.float64).T
    return as_codes(codes, bias), expected if bias is None else expected + bias


def rows(dtype: torch.dtype) -> Tensor:
    return 2 * random(70, INPUTS, dtype=dtype)


@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, OUT)], ids=["no bias", "bias"])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_activations_have_the_step_of_the_checkpoint(
    dtype: torch.dtype, bias: Tensor | None
) -> None:
    """Others are cut off where it says, and its zero is taken away again."""
    ops = NpuDevice(dtype).ops
    weight, expected = with_fixed_steps(dtype, bias)
    packed = ops.pack(weight)
    assert isinstance(packed, CodedLinear) and packed.form == coded_linear.FIXED
    found = ops.linear(rows(dtype).to("npu"), packed).cpu()
    assert found.dtype == dtype
    assert largest_difference(found, expected) < 0.005 * float(expected.abs().max())
    # As a rank of two has it, whose summands have the zero of their own inputs.
    halves = [weight.shard("in", [(first, first + INPUTS // 2)]) for first in (0, INPUTS // 2)]
    sums = [
        ops.linear(some.contiguous().to("npu"), ops.pack(half))
        for some, half in zip(rows(dtype).chunk(2, 1), halves, strict=True)
    ]
    whole = expected if bias is None else expected - bias
    own = torch.zeros(OUT) if bias is None else 2 * bias  # each has the whole one
    assert largest_difference(
        sums[0].cpu().float() + sums[1].cpu().float() - own, whole
    ) < 0.01 * float(whole.abs().max())


def test_of_layers_with_other_steps_each_token_has_its_own() -> None:
    """Where they are computed as one."""
    ops = NpuDevice(torch.float16).ops
    made = Form(bits=8).make(OUT, INPUTS)
    alike, other = (
        StackedWeight(
            [
                as_codes(replace(made, activations=8, fixed=fixed))
                for fixed in ((STEP, ZERO), second)
            ]
        )
        for second in ((STEP, ZERO), (2 * STEP, ZERO))
    )
    for weight, form in ((alike, coded_linear.FIXED), (other, coded_linear.WHOLE)):
        packed = ops.pack(weight)
        assert isinstance(packed, CodedLinear) and packed.form == form


@pytest.mark.parametrize("wrong", ["npu_quantize", "bias"])
def test_fixed_steps_that_an_operator_takes_otherwise_are_not_taken(
    monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    if wrong == "npu_quantize":
        quantize = torch_npu.npu_quantize

        def multiplied(x: Tensor, steps: Tensor, *others: object) -> object:
            return quantize(x, 1 / steps, *others)

        monkeypatch.setattr(torch_npu, wrong, multiplied)
    else:
        product = torch_npu.npu_quant_matmul

        def unbiased(*given: object, bias: object, **options: object) -> object:
            kept = bias if "pertoken_scale" in options else None
            return product(*given, bias=kept, **options)

        monkeypatch.setattr(torch_npu, "npu_quant_matmul", unbiased)
    packed = NpuDevice(torch.float16).ops.pack(with_fixed_steps(torch.float16, None)[0])
    assert isinstance(packed, CodedLinear) and packed.form == coded_linear.WHOLE


def test_no_more_than_a_part_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coded_linear, "_MOST_AT_ONCE", 64 * INPUTS)
    codes = Form(group=32).make(200, INPUTS)
    read: list[int] = []
    weight = as_codes(codes)
    whole = weight.codes()
    assert whole is not None

    def counted(rows: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> object:
        read.append(len(rows))
        return whole(rows)

    monkeypatch.setattr(weight, "codes", lambda: counted)
    packed = NpuDevice(torch.float16).ops.pack(weight)
    assert isinstance(packed, CodedLinear) and max(read) == 64


_310P = """
import torch
from services.decoder.devices.npu.weights import coded_linear
from services.decoder.devices.npu.device import NpuDevice
from shared.errors import InvalidRequest
from shared.weights.linear_weight import as_codes
from tests.ascend.decoder.test_codes import require_products
from tests.support.decoder.coded_weights import FORMS, Form
device = NpuDevice(torch.float16)
kept = {str(form) for form in FORMS if require_products(device.ops, as_codes(form.make(64, 256)))}
assert kept == {"int8-g0-float32", "int8-g0-bfloat16-zeros"}, kept
from tests.ascend.decoder.test_codes import largest_difference, rows, with_fixed_steps
weight, expected = with_fixed_steps(torch.float16, torch.linspace(-1, 1, 64))
packed = device.ops.pack(weight)
assert packed.form == coded_linear.FIXED
found = device.ops.linear(rows(torch.float16).to("npu"), packed)
assert largest_difference(found, expected) < 0.005 * float(expected.abs().max())
device.require_scheme("int8")
for name in ("int4", "int8g128", "int8-fast"):
    try:
        device.require_scheme(name)
    except InvalidRequest as error:
        assert "on an Ascend 310P weights have 8 bits and one scale" in str(error)
    else:
        raise AssertionError(name)
"""


def test_a_310p_takes_codes_of_8_bits_with_one_scale_for_each_output(tmp_path: Path) -> None:
    run_python(
        _310P, npu_environment("310P3", base={**os.environ, "XDG_CACHE_HOME": str(tmp_path)})
    )
