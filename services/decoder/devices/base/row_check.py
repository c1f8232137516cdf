"""Whether this machine's libraries keep what `row_invariant` promises: tried at every start.

The rules in `cpu/torch_ops.py` were found by measurement; another processor makes a library choose other
kernels. A decoder that fails here runs, but promises nothing about equal bits.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from services.decoder.devices.base.ops import BaseOps
from services.decoder.steps.attention_meta import KVSpec
from shared.weights.linear_weight import LinearWeight, as_codes, in_memory
from shared.weights.on_the_fly import quantize
from shared.weights.scheme import SCHEMES, Scheme

_SIZES = ((256, 320), (896, 512))  # inputs and outputs of linear layers
_ROWS = (1, 2, 5, 8, 13, 16, 37)
_KEYS = 300
_HEADS = (4, 2, 32)  # of queries, of keys, size


def rows_are_equal(ops: BaseOps) -> bool:
    """True if linear layers and attention give equal rows in batches of several sizes. Where some layers are codes,
    those of every form are tried."""
    generator = torch.Generator().manual_seed(0)
    # Of the model, not of what is tried.
    counted = ops.coded_layers, ops.coded_weights, ops.coded_bytes
    with torch.inference_mode():
        linear = all(
            _linear_holds(ops, generator, weight)
            for sizes in _SIZES
            for weight in _weights(ops, generator, *sizes)
        )
        ops.coded_layers, ops.coded_weights, ops.coded_bytes = counted
        return linear and all(
            _attention_holds(ops, generator, coded) for coded in {False, ops.codes_cache}
        )


def _weights(
    ops: BaseOps, generator: torch.Generator, inputs: int, outputs: int
) -> Iterator[LinearWeight]:
    weight = in_memory(torch.randn(outputs, inputs, generator=generator))
    yield weight
    if not ops.coded_layers:
        return
    for scheme in SCHEMES.values():
        yield as_codes(quantize(weight, scheme))
    codes = quantize(weight, Scheme(4, 32, 2))
    yield as_codes(replace(codes, zeros=None, minima=-codes.scales))
    yield as_codes(replace(codes, zeros=None, codebook=tuple(range(-120, 120, 15))))
    yield as_codes(replace(codes, order=torch.arange(inputs).flip(0)))
    codes = quantize(weight, Scheme(8, 32, 2))
    for bits in (5, 6):  # of GGUF's blocks, with scales of two levels
        least, count = 128 - 2 ** (bits - 1), 2**bits
        factors = (
            (torch.arange(codes.scales.numel()) % 63 - 31).view_as(codes.scales).to(torch.int8)
        )
        few, span = codes.codes % count + least, (least, least + count - 1)
        yield as_codes(replace(codes, codes=few, zeros=None, factors=factors, span=span))


def _linear_holds(ops: BaseOps, generator: torch.Generator, weight: LinearWeight) -> bool:
    packed = ops.pack_unchanged(weight)
    x = torch.randn(64, weight.inputs, generator=generator).to(ops.device, ops.dtype)
    whole = ops.linear(x, packed)
    return all(torch.equal(ops.linear(x[:rows].clone(), packed), whole[:rows]) for rows in _ROWS)


def _attention_holds(ops: BaseOps, generator: torch.Generator, coded: bool) -> bool:
    """Runs one sequence whole, in chunks, and its last token alone."""
    num_q, num_kv, size = _HEADS
    blocks = -(-_KEYS // ops.block_size)
    kv = ops.alloc_kv(KVSpec(num_kv, size, size, ops.dtype, coded=coded), blocks + 1)
    draw = [torch.randn(_KEYS, n, size, generator=generator) for n in (num_q, num_kv, num_kv)]
    q, k, v = (x.to(ops.device, ops.dtype) for x in draw)
    table = torch.arange(1, blocks + 1, dtype=torch.int32).to(ops.device)[None]

    def attend(start: int, end: int) -> Tensor:
        slots = torch.arange(start, end).to(ops.device) + ops.block_size
        meta = ops.make_meta([end - start], [end], table, slots)
        ops.kv_write(k[start:end], v[start:end], kv, meta)
        return ops.paged_attention(
            q[start:end], k[start:end], v[start:end], kv, meta, scale=size**-0.5
        ).clone()

    whole = attend(0, _KEYS)
    parts = ((0, 50), (50, 250), (250, _KEYS - 1), (_KEYS - 1, _KEYS))
    return all(torch.equal(attend(a, b), whole[a:b]) for a, b in parts)
