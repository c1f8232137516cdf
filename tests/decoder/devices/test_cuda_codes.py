"""Weights of codes as they lie in a GPU's memory, and their products by torch alone."""

from dataclasses import replace

import pytest
import torch
from structlog.testing import capture_logs

from services.decoder.devices.base.ops import BaseOps
from services.decoder.devices.cuda import coded_linear, kernel_trials
from services.decoder.devices.cuda.coded_linear import CodedLinear
from services.decoder.devices.cuda.device import CudaDevice
from services.decoder.devices.cuda.ops import CudaOps
from shared.weights.linear_weight import LinearWeight, as_codes, in_memory
from shared.weights.on_the_fly import quantize
from shared.weights.scheme import SCHEMES, SMALL
from tests.support.decoder.coded_weights import FORMS, Form
from tests.support.decoder.packs import changed

CPU = torch.device("cpu")


def packed_of(weight: LinearWeight, dtype: torch.dtype = torch.float32) -> CodedLinear:
    found = CudaOps(CPU, dtype).pack(weight)
    assert isinstance(found, CodedLinear)
    return found


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_codes_of_every_form_stand_for_the_same_numbers(form: Form, dtype: torch.dtype) -> None:
    whole = as_codes(form.make(64, 272 if form.group in (0, 16) else 288))
    for weight in (whole, changed(whole)):
        packed = packed_of(weight, dtype)
        found = coded_linear.numbers(packed, slice(0, packed.outputs), dtype)
        if packed.order is not None:
            found = found[:, torch.argsort(packed.order)]
        assert torch.equal(found, weight.dense(dtype))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_product_with_codes_is_that_of_the_reference(
    form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coded_linear, "_NUMBERS_AT_ONCE", 20 * 256)  # several parts of the outputs
    weight = as_codes(form.make(64, 256), torch.linspace(-1, 1, 64))
    ops, plain = CudaOps(CPU, torch.float32), BaseOps(CPU, torch.float32)
    x = torch.randn(5, 256)
    expected = plain.linear(x, plain.pack(weight))
    torch.testing.assert_close(ops.linear(x, ops.pack(weight)), expected, rtol=1e-4, atol=1e-4)


def test_columns_cut_out_of_ordered_groups_are_multiplied() -> None:
    codes = Form(bits=4, group=32, order=True).make(64, 256)
    weight = as_codes(codes).shard("in", [(0, 128)])
    ops, x = CudaOps(CPU, torch.float32), torch.randn(3, 128)
    packed = ops.pack(weight)
    assert isinstance(packed, CodedLinear) and packed.columns > 128
    expected = x @ weight.dense(torch.float32).T
    torch.testing.assert_close(ops.linear(x, packed), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SCHEMES)
def test_what_is_quantized_at_load_takes_the_memory_of_its_codes(name: str) -> None:
    ops = CudaOps(CPU, torch.bfloat16)
    ops.scheme = CudaDevice.find_scheme(CudaDevice.__new__(CudaDevice), name, SMALL)
    assert ops.scheme is not None
    packed = ops.pack(in_memory(torch.randn(512, 1024)))
    assert isinstance(packed, CodedLinear)
    scales = 4 / ops.scheme.group if ops.scheme.group else 4 / 1024
    assert packed.num_bytes == ops.coded_bytes == (ops.scheme.bits / 8 + scales) * 512 * 1024
    assert (ops.coded_layers, ops.coded_weights) == (1, 512 * 1024)


def test_activations_of_8_bits_meet_whole_numbers_where_there_are_many() -> None:
    ops = CudaOps(CPU, torch.float32)
    ops.scheme = CudaDevice.find_scheme(CudaDevice.__new__(CudaDevice), "int8-fast", SMALL)
    bias = torch.linspace(-1, 1, 64)
    packed = ops.pack(in_memory(torch.randn(64, 256), bias))
    assert isinstance(packed, CodedLinear) and packed.is_whole
    numbers = coded_linear.numbers(packed, slice(0, 64), torch.float32)
    steps = torch.rand(40, 1) + 0.5
    codes = torch.randint(-127, 128, (40, 256)).float()
    codes[:, 0] = 127  # so that the steps are found again
    expected = (codes * steps) @ numbers.T + bias
    torch.testing.assert_close(ops.linear(codes * steps, packed), expected, rtol=1e-4, atol=1e-3)
    x = torch.randn(40, 256)
    off = (ops.linear(x, packed) - x @ numbers.T - bias).abs()
    assert 0 < off.max() < 0.5  # each row has steps of its own
    few = ops.linear(x[:16], packed)
    torch.testing.assert_close(few, x[:16] @ numbers.T + bias, rtol=1e-4, atol=1e-4)
    assert not ops.linear(torch.zeros(17, 256), replace(packed, bias=None)).any()


def test_groups_and_zeros_are_multiplied_by_numbers_whatever_activations_should_have() -> None:
    for form in (Form(group=32), Form(zeros=True)):
        codes = replace(form.make(64, 256), activations=8)
        assert not packed_of(as_codes(codes)).is_whole


def test_without_triton_torch_multiplies_and_attends_which_is_logged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel_trials, "has_triton", lambda: False)
    ops = CudaOps(CPU, torch.bfloat16, has_kernels=True)
    with capture_logs() as logs:
        packed = ops.pack(as_codes(quantize(in_memory(torch.randn(64, 256)), SCHEMES["int4"])))
        assert not ops.reads_what_rows_have
    assert [line["reason"] for line in logs] == ["there is no package triton"] * 2
    assert ops.linear(torch.randn(3, 256).bfloat16(), packed).shape == (3, 64)


def test_every_scheme_is_served() -> None:
    for name in SCHEMES:
        CudaDevice.require_scheme(CudaDevice.__new__(CudaDevice), name)
