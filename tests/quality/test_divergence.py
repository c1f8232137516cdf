"""The gate of quantization: what each way of computing our models may cost, and that a broken one costs more."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.quality.distributions import of_decoder, of_transformers
from benchmarks.quality.divergence import divergence
from benchmarks.quality.quality import measure
from benchmarks.quality.text_model.export import CHECKPOINT as TEXT_MODEL
from benchmarks.quality.texts import texts_for
from benchmarks.quality.ways import WAYS
from services.decoder.devices.base.ops import BaseOps
from services.decoder.devices.cpu.ops import CpuOps
from services.decoder.loading.quality import way_name
from services.decoder.steps.attention_meta import PagedKV
from shared.checkpoint.folder import Checkpoint
from shared.kv_cache_dtype import INT8
from shared.settings import DEMO_MODEL
from shared.weights import on_the_fly
from shared.weights.quantized_weight import QuantizedWeight
from shared.weights.scheme import NONE

_TOKENS = 512
_CACHE = way_name(NONE, INT8)
# Nats: for the text model, and for the demo model, half as much again as was measured on these texts.
BOUNDS = {
    "float32": (1e-6, 1e-6),
    "bfloat16": (1.03e-4, 3.2e-4),
    "int8": (3.8e-4, 7e-4),
    "int8g128": (3.2e-4, 5e-4),
    "int8-fast": (1.17e-3, 1.2e-3),
    "int4": (0.0305, 0.125),  # the same as int4g32 for models of this size
    "int4g64": (0.04, 0.11),
    "int4g128": (0.0505, 0.125),
    "int4g256": (0.0645, 0.145),
    _CACHE: (2.7e-4, 1.15e-3),
    way_name("int8", INT8): (6.1e-4, 1.03e-3),
}
_MODELS = (TEXT_MODEL, DEMO_MODEL)


@cache
def compared(model: Path) -> tuple[list[list[int]], list[Tensor]]:
    """Texts, and the reference's distributions."""
    _, texts = texts_for(model, _TOKENS)
    return texts, list(of_transformers(Checkpoint(model), texts))


def kl(model: Path, name: str) -> float:
    texts, reference = compared(model)
    return measure(model, {name: WAYS[name]}, texts, reference)[name].kl


def test_every_way_has_a_bound() -> None:
    assert BOUNDS.keys() | {"int4g32"} == WAYS.keys()


@pytest.mark.parametrize("model", _MODELS, ids=["text", "demo"])
@pytest.mark.parametrize("name", BOUNDS)
def test_no_way_is_further_from_float32_than_its_bound(name: str, model: Path) -> None:
    found, bound = kl(model, name), BOUNDS[name][_MODELS.index(model)]
    assert found < bound
    if name != "float32":  # what is measured is not the reference itself
        assert found > bound / 10


def with_a_wrong_zero(codes: QuantizedWeight) -> QuantizedWeight:
    if codes.zeros is not None:
        return replace(codes, zeros=(codes.zeros + 1).clamp(max=15))
    return replace(codes, codes=(codes.codes.int() + 1).clamp(max=255).to(torch.uint8))


def with_a_doubled_scale(codes: QuantizedWeight) -> QuantizedWeight:
    return replace(codes, scales=2 * codes.scales)


def with_half_the_codes(codes: QuantizedWeight) -> QuantizedWeight:
    return replace(codes, codes=codes.codes & (0xFE if codes.bits == 8 else 0xEE))


@pytest.mark.parametrize("model", _MODELS, ids=["text", "demo"])
@pytest.mark.parametrize("broken", [with_a_wrong_zero, with_a_doubled_scale, with_half_the_codes])
@pytest.mark.parametrize(("name", "maker"), [("int8", "_to_bytes"), ("int4g64", "_to_halves")])
def test_a_quantizer_that_is_broken_is_over_the_bound(
    name: str,
    maker: str,
    broken: Callable[[QuantizedWeight], QuantizedWeight],
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = getattr(on_the_fly, maker)
    monkeypatch.setattr(on_the_fly, maker, lambda rows, group: broken(right(rows, group)))
    assert kl(model, name) > BOUNDS[name][_MODELS.index(model)]


@pytest.mark.parametrize("model", _MODELS, ids=["text", "demo"])
def test_a_cache_of_half_the_codes_is_over_the_bound(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Texts are read in one chunk: what attention reads is the cache then, too.
    right = CpuOps.qkv_rope_write

    def coarse(self: CpuOps, qkv: Tensor, cos: Tensor, sin: Tensor, *rest: Any) -> Any:
        made = right(self, qkv, cos, sin, *rest)
        cache: PagedKV = rest[1]
        codes = cache.k.shape[-1]  # scales are behind those of values
        cache.k.bitwise_and_(0xFE)
        cache.v[..., :codes].bitwise_and_(0xFE)
        return made

    monkeypatch.setattr(CpuOps, "qkv_rope_write", coarse)
    monkeypatch.setattr(CpuOps, "decoder_layer", BaseOps.decoder_layer)  # in steps
    assert kl(model, _CACHE) > BOUNDS[_CACHE][_MODELS.index(model)]


@pytest.mark.parametrize("name", [_CACHE, way_name("int8", INT8)])
def test_a_cache_of_codes_gives_the_same_whole_and_in_chunks(name: str) -> None:
    texts, _ = compared(TEXT_MODEL)
    settings = {"model": TEXT_MODEL, **WAYS[name].settings}
    [whole] = of_decoder(settings, texts[:1])
    [chunked] = of_decoder({**settings, "max_num_batched_tokens": 48}, texts[:1])
    assert torch.equal(whole, chunked)


def test_a_divergence_is_what_its_definition_gives() -> None:
    p, q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.5, 0.25]])
    found = divergence([[0, 1]], [p.log()], [q.log()])
    assert found.kl == pytest.approx(0.25 * torch.tensor(2.0).log().item())
    assert (found.same_top, found.places) == (0.0, 1)
    assert found.loss == pytest.approx(-torch.tensor(0.5).log().item())
