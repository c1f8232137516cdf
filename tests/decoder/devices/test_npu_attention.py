"""How a step's attention is cut into calls of a fused kernel, and how a kernel is tried: without an NPU."""

import numpy as np
import pytest
import torch
from torch import Tensor

from services.decoder.devices.base.ops import BaseOps
from services.decoder.devices.npu.attention_call import attention_calls
from services.decoder.devices.npu.trials.telling_batch import TellingBatch
from services.decoder.steps.attention_meta import KVSpec
from tests.support.decoder.fused_kernel import FAULTS, fused_attention

CPU = torch.device("cpu")
SIZE = 128  # tokens in a block


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [(1, 3, 9)],
        [(1, 0, 12)],
        [(0, 0, 4), (1, 0, 5), (1, 5, 12)],
        [(2, 130, 150), (2, 160, 170), (2, 190, 400)],
        [(2, 100, 171), (2, 180, 181)],
    ],
)
def test_the_calls_of_a_step_give_what_the_reference_gives(
    spans: list[tuple[int, int, int]],
) -> None:
    """Row 2 is a later chunk: of spans that reach into it, what was computed before stands in the cache alone."""
    ops, size = BaseOps(CPU, torch.float32, SIZE), 16
    counts, keys = [1, 12, 60], [300, 12, 200]
    torch.manual_seed(0)
    kv = ops.alloc_kv(KVSpec(2, size, size, torch.float32), 8)
    kv.k.normal_()
    kv.v.normal_()
    table = torch.tensor([[4, 2, 7], [1, 0, 0], [5, 3, 0]], dtype=torch.int32)
    q = torch.randn(sum(counts), 4, size)
    slots = torch.zeros(len(q), dtype=torch.int64)
    meta = ops.make_meta(counts, keys, table, slots, spans)
    out = torch.full_like(q, float("nan"))
    for call in attention_calls(meta, torch.from_numpy):
        tokens = torch.arange(len(q)) if call.tokens is None else call.tokens
        assert call.ends[-1] == len(tokens)
        assert len(call.table) == len(call.kv_lens) == len(call.ends)
        out[tokens] = fused_attention(q[tokens], kv, call, 0.25)
    expected = ops.paged_attention(q, q, q, kv, meta, scale=0.25)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_rows_without_spans_take_one_call() -> None:
    meta = BaseOps(CPU, torch.float32, SIZE).make_meta(
        [1, 5], [9, 5], torch.zeros((2, 1), dtype=torch.int32), torch.zeros(6, dtype=torch.int64)
    )

    def send(array: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Tensor:
        raise AssertionError("nothing is to be sent")

    [call] = attention_calls(meta, send)
    assert (call.ends, call.kv_lens, call.tokens, call.causal) == ([1, 6], [9, 5], None, True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fault", ["", *FAULTS])
@pytest.mark.parametrize("heads", [(4, 2, 64), (8, 4, 128)])
def test_the_batch_that_kernels_are_tried_with_tells_faults(
    fault: str, dtype: torch.dtype, heads: tuple[int, int, int]
) -> None:
    batch = TellingBatch.draw(dtype, SIZE, heads)
    if fault in ("", "window"):
        batch = batch.with_window()
    found = fused_attention(batch.q, batch.kv, batch.call, batch.scale, batch.window, fault)
    error = batch.error(found)
    assert error > 2 * batch.tolerance if fault else error < batch.tolerance / 2
