"""A layer in one call of the kernels: every bit is what the ops one by one give."""

import pytest
import torch
from torch import Tensor

from services.decoder.devices.base.decoder_layer import DecoderLayer
from services.decoder.devices.base.ops import BaseOps
from services.decoder.devices.cpu.ops import CpuOps
from services.decoder.steps.attention_meta import HeadNorms, Heads
from shared.cpu_kernels import binding
from shared.weights.linear_weight import in_memory
from shared.weights.scheme import SMALL, find_scheme
from tests.support.decoder.instruction_sets import RUNNABLE, each, open_kernels
from tests.support.decoder.paged_rows import LENGTHS, ROWS, Cache

if not RUNNABLE:
    pytest.skip("there are no kernels for this processor", allow_module_level=True)


@pytest.fixture(scope="module", params=each())
def kernels(request: pytest.FixtureRequest) -> binding.Kernels:
    return open_kernels(request.param)


def make_layer(
    ops: BaseOps, heads: Heads, hidden: int, inner: int, *, norms: bool, window: int | None
) -> DecoderLayer:
    width, both = heads.num_q * heads.size, (heads.num_q + 2 * heads.num_kv) * heads.size

    def vector(size: int) -> Tensor:
        return ops.vector(1 + torch.randn(size) / 8)

    return DecoderLayer(
        qkv=ops.pack(in_memory(torch.randn(both, hidden) / 8, torch.randn(both))),
        output=ops.pack(in_memory(torch.randn(hidden, width) / 8)),
        post_norm=vector(hidden),
        gate_up=ops.pack_gate_up(in_memory(torch.randn(2 * inner, hidden) / 8)),
        down=ops.pack(in_memory(torch.randn(hidden, inner) / 8)),
        after_norm=vector(hidden),
        heads=heads,
        norms=HeadNorms(vector(heads.size), vector(heads.size), 1e-5) if norms else None,
        scale=heads.size**-0.5,
        window=window,
        eps=1e-5,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("hidden", "inner"), [(96, 200), (96, 201), (41, 64)])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("together", "scheme"), [(True, "none"), (False, "none"), (True, "int8")])
def test_layers_are_bit_equal_to_their_parts(
    kernels: binding.Kernels,
    dtype: torch.dtype,
    hidden: int,
    inner: int,
    norms: bool,
    together: bool,
    scheme: str,
) -> None:
    """Two layers that differ in all but their shape, over rows of one token and of many;
    odd sizes have to be padded between one linear layer and the next."""
    torch.manual_seed(0)
    ops, heads = CpuOps(dtype, kernels), Heads(6, 2, 24)
    ops.scheme = find_scheme(scheme, SMALL)
    layers = [
        make_layer(ops, heads, hidden, inner, norms=norms, window=window) for window in (None, 33)
    ]
    rows = ROWS if together else ROWS[1:2]
    tokens = sum(row.count for row in rows)
    x = torch.randn(tokens, hidden).to(dtype)
    angles = torch.randn(tokens, 1, heads.size)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    results = []
    for function in (CpuOps.decoder_layer, BaseOps.decoder_layer):
        caches = [Cache(ops, heads, LENGTHS, seed) for seed in range(2)]
        _, meta = caches[0].batch(rows)
        normed, residual = x.clone(), x.flip(0).contiguous()
        for layer, cache in zip(layers, caches, strict=True):
            normed, residual = function(ops, normed, residual, layer, cos, sin, cache.kv, meta)
        results.append([normed, residual, *(x for c in caches for x in (c.kv.k, c.kv.v))])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_a_description_of_a_batch_may_be_used_again(kernels: binding.Kernels) -> None:
    """With other rows, or for layers of another shape."""
    torch.manual_seed(0)
    ops, heads = CpuOps(torch.float32, kernels), Heads(4, 2, 16)
    cache = Cache(ops, heads, LENGTHS)
    _, meta = cache.batch(ROWS)
    tokens = meta.cu_q[-1]
    cos = sin = torch.randn(tokens, 1, heads.size)
    for hidden, inner in ((64, 96), (64, 96), (64, 128), (32, 96)):
        layer = make_layer(ops, heads, hidden, inner, norms=False, window=None)
        x = torch.randn(tokens, hidden)
        found, expected = (
            function(ops, x.clone(), x.clone(), layer, cos, sin, cache.kv, meta)
            for function in (CpuOps.decoder_layer, BaseOps.decoder_layer)
        )
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
