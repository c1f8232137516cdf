"""How many calls of torch's attention a step takes on a GPU without kernels of its own."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from services.decoder.devices.cuda.ops import CudaOps
from services.decoder.steps.attention_meta import KVSpec

CPU = torch.device("cpu")


def shapes_of(
    counts: list[int], lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> list[tuple[int, int, int]]:
    """Of each call: rows, queries and keys."""
    found: list[tuple[int, int, int]] = []
    right = F.scaled_dot_product_attention

    def spy(q: torch.Tensor, k: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        found.append((q.shape[0], q.shape[2], k.shape[2]))
        return right(q, k, *rest, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    ops, width = CudaOps(CPU, torch.float32), -(-max(lengths) // 16)
    kv = ops.alloc_kv(KVSpec(2, 16, 16, torch.float32), width + 1)
    table = torch.ones((len(counts), width), dtype=torch.int32)
    q, k = torch.randn(sum(counts), 2, 16), torch.randn(sum(counts), 2, 16)
    meta = ops.make_meta(counts, lengths, table, torch.zeros(sum(counts), dtype=torch.int64))
    ops.paged_attention(q, k, k, kv, meta, scale=1.0)
    return found


def test_prompts_of_about_one_length_attend_together(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shapes_of([130, 140, 150, 200], [130, 140, 150, 200], monkeypatch) == [(4, 200, 200)]


def test_no_row_is_padded_to_twice_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, lengths = [1, 1, 5, 6, 100, 120], [40, 50, 90, 6, 1000, 120]
    tokens = shapes_of(counts, lengths, monkeypatch)
    assert tokens == [(2, 1, 64), (1, 5, 90), (1, 6, 6), (1, 100, 1000), (1, 120, 120)]


def test_long_prompts_are_cut_to_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shapes_of([600], [600], monkeypatch) == [(1, 256, 256), (1, 256, 512), (1, 88, 600)]
