"""Kernels in Triton's language against the reference: on a GPU, or with TRITON_INTERPRET=1 and NumPy before 2.4 by
Triton's interpreter, which knows no bfloat16."""

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from structlog.testing import capture_logs

from services.decoder.devices.base.ops import BaseOps
from services.decoder.devices.cuda import coded_linear, kernel_trials
from services.decoder.devices.cuda.coded_linear import CodedLinear
from services.decoder.devices.cuda.ops import CudaOps
from services.decoder.steps.attention_meta import Heads, KVSpec, PagedKV
from shared.weights.linear_weight import as_codes
from tests.support.decoder.coded_weights import FORMS, Form

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
RUNS = importlib.util.find_spec("triton") is not None and (INTERPRETED or torch.cuda.is_available())
pytestmark = pytest.mark.skipif(not RUNS, reason="there is no GPU with Triton here")

CPU = torch.device("cpu")
DEVICE = CPU if INTERPRETED else torch.device("cuda")
HALF = torch.float16 if INTERPRETED else torch.bfloat16
TOLERANCE = {torch.float16: 0.01, torch.bfloat16: 0.03}
# Tokens of rows, and keys that the last of each sees.
STEPS = [
    ([1, 1, 1, 1], [1, 16, 17, 300]),
    ([1, 1, 2, 40, 130], [65, 300, 2, 40, 200]),
    ([70], [70]),
    ([3], [290]),
]


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize(
    ("heads", "size_v"), [(Heads(4, 4, 16), 16), (Heads(14, 2, 64), 64), (Heads(6, 3, 40), 24)]
)
@pytest.mark.parametrize("window", [None, 33])
def test_attention_is_that_of_the_reference(heads: Heads, size_v: int, window: int | None) -> None:
    plain, dtype = BaseOps(CPU, torch.float32), HALF
    ops = CudaOps(DEVICE, dtype, has_kernels=True)
    assert ops.reads_what_rows_have
    for counts, lengths in STEPS:
        rows, width = len(counts), -(-max(lengths) // 16) + 2
        spec = KVSpec(heads.num_kv, heads.size, size_v, torch.float32)
        kv = plain.alloc_kv(spec, rows * width + 1)
        kv.k.copy_(torch.randn(kv.k.shape).to(dtype))
        kv.v.copy_(torch.randn(kv.v.shape).to(dtype))
        kv.k[0], kv.v[0] = torch.nan, torch.nan  # of no row
        table = (torch.randperm(rows * width) + 1).to(torch.int32).view(rows, width)
        for row, length in enumerate(lengths):
            table[row, -(-length // 16) :] = 0
        padded = sum(counts) + 3
        q = torch.randn(padded, heads.num_q, heads.size).to(dtype)
        v = torch.empty(padded, heads.num_kv, size_v)
        slots = torch.zeros(padded, dtype=torch.int64)
        expected = plain.paged_attention(
            q.float(),
            v,
            v,
            kv,
            plain.make_meta(counts, lengths, table, slots),
            scale=0.2,
            window=window,
        )
        there = PagedKV(*(part.to(DEVICE, dtype) for part in (kv.k, kv.v)))
        meta = ops.make_meta(counts, lengths, table.to(DEVICE), slots.to(DEVICE))
        given = v.to(DEVICE, dtype)
        found = ops.paged_attention(
            q.to(DEVICE), given, given, there, meta, scale=0.2, window=window
        )
        off = TOLERANCE[dtype]
        torch.testing.assert_close(found.cpu().float(), expected, rtol=off, atol=off)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_products_with_codes_are_those_of_the_reference(form: Form) -> None:
    dtype, inputs = HALF, 272 if form.group in (0, 16) else 288
    weight = as_codes(form.make(80, inputs), torch.linspace(-1, 1, 80))
    plain, ops = BaseOps(CPU, torch.float32), CudaOps(DEVICE, dtype, has_kernels=True)
    with capture_logs() as logs:
        packed = ops.pack(weight)
    assert not logs
    exact = replace(plain.pack(weight), weight=weight.dense(dtype).float())
    for rows in (0, 1, 5, 16, 40, 70):
        x = torch.randn(rows, inputs).to(dtype)
        found = ops.linear(x.to(DEVICE), packed).cpu().float()
        off = TOLERANCE[dtype]
        torch.testing.assert_close(found, plain.linear(x.float(), exact), rtol=off, atol=off)


def test_columns_are_divided_among_programs() -> None:
    """Many inputs and few outputs."""
    weight = as_codes(Form(bits=4, group=32, zeros=True).make(16, 8224))
    ops = CudaOps(DEVICE, HALF, has_kernels=True)
    packed, x = ops.pack(weight), torch.randn(2, 8224).to(HALF)
    found = ops.linear(x.to(DEVICE), packed).cpu().float()
    expected = x.float() @ weight.dense(HALF).float().T
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.1)


def test_a_kernel_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from services.decoder.devices.cuda.kernels import attention, linear

    right = coded_linear.product

    def wrong(x: torch.Tensor, packed: CodedLinear) -> torch.Tensor:
        return right(x, packed) * 1.2

    def broken(*_: object) -> None:
        raise RuntimeError("no such instruction\nand more")

    monkeypatch.setattr(linear, "product", wrong)
    monkeypatch.setattr(attention, "attend", broken)
    ops = CudaOps(DEVICE, HALF, has_kernels=True)
    with capture_logs() as logs:
        packed = ops.pack(as_codes(Form().make(64, 256)))
        assert isinstance(packed, CodedLinear)
        found: list[ModuleType | None] = [
            kernel_trials.right_linear(packed, HALF),
            kernel_trials.right_attention(ops),
        ]
    assert found == [None, None]
    first, _, last = logs
    assert "something else" in first["reason"] and last["reason"] == "no such instruction"
