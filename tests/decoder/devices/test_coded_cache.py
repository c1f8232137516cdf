"""Attention on the CPU to keys and values of 8 bits: what a token's bits depend on, how far they are from numbers', and
blocks of codes that go out and in."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from services.decoder.devices.base.ops import BaseOps
from services.decoder.devices.base.row_check import rows_are_equal
from services.decoder.devices.cpu.ops import CpuOps
from services.decoder.models.kept_keys import kept_elements
from services.decoder.steps.attention_meta import KVSpec, PagedKV
from shared.cpu_kernels.instruction_sets import InstructionSet
from tests.support.decoder.instruction_sets import RUNNABLE, each, open_kernels

CPU = torch.device("cpu")
if not RUNNABLE:
    pytest.skip("there are no kernels for this processor", allow_module_level=True)

Make = Callable[..., CpuOps]
LENGTH, HEADS, SHARE, SIZE = 300, 2, 3, 40
BIAS = 200.0  # of a pair of elements of the first head's keys


def _own(known: InstructionSet) -> Make:
    def make(dtype: torch.dtype, block_size: int = 16) -> CpuOps:
        ops = CpuOps(dtype, open_kernels(known, 2), block_size)
        ops.codes_cache = True
        return ops

    return make


@pytest.fixture(params=each(_own))
def make(request: pytest.FixtureRequest) -> Any:
    return request.param


def _spec(ops: BaseOps, kept: tuple[tuple[int, ...], ...] = (), coded: bool = True) -> KVSpec:
    return KVSpec(HEADS, SIZE, SIZE, ops.dtype, coded=coded, kept=kept)


class Drawn:
    """A sequence of random tokens, the bias on the keys of one pair."""

    def __init__(self, dtype: torch.dtype, bias: float = 0) -> None:
        numbers = torch.Generator().manual_seed(3)
        q, k, v = (
            torch.randn(LENGTH, heads, SIZE, generator=numbers)
            for heads in (HEADS * SHARE, HEADS, HEADS)
        )
        k[:, 0, 7] += bias
        k[:, 0, 7 + SIZE // 2] -= bias / 2
        self.q, self.k, self.v = (x.to(dtype) for x in (q, k, v))

    def attend(
        self, ops: BaseOps, kv: PagedKV, table: Tensor, start: int, end: int, **options: Any
    ) -> Tensor:
        """Writes tokens [start, end), and what they see."""
        places = torch.arange(start, end)
        slots = table[0][places // ops.block_size].long() * ops.block_size + places % ops.block_size
        meta = ops.make_meta([end - start], [end], table, slots)
        part = slice(start, end)
        ops.kv_write(self.k[part], self.v[part], kv, meta)
        return ops.paged_attention(
            self.q[part], self.k[part], self.v[part], kv, meta, scale=SIZE**-0.5, **options
        )


def _table(ops: BaseOps) -> Tensor:
    count = -(-LENGTH // ops.block_size)
    return torch.arange(count, 0, -1, dtype=torch.int32)[None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [16, 48])
def test_codes_say_nearly_what_numbers_say(make: Make, dtype: torch.dtype, block_size: int) -> None:
    """With biases as large as Qwen2's, too, where what they are added to is kept beside codes."""
    ops, plain = make(dtype, block_size), BaseOps(CPU, torch.float32, block_size)
    table = _table(ops)
    for bias, window, softcap in ((0.0, None, None), (BIAS, None, None), (BIAS, 70, 2.0)):
        drawn, exact = Drawn(dtype, bias), Drawn(torch.float32, bias)
        large = torch.zeros(HEADS, SIZE)
        large[0, 7] = bias
        kept = kept_elements(large.flatten(), HEADS)
        assert kept == (((7, 27), ()) if bias else ())
        options = {"window": window, "softcap": softcap}
        kv = ops.alloc_kv(_spec(ops, kept), table.shape[1] + 1)
        found = drawn.attend(ops, kv, table, 0, LENGTH, **options)
        numbers = plain.alloc_kv(_spec(plain, coded=False), table.shape[1] + 1)
        expected = exact.attend(plain, numbers, table, 0, LENGTH, **options)
        off = (found.float() - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
        assert off < (0.02 if not bias or dtype == torch.float32 else 0.1)
        if bias:  # without that nothing is left of the other elements
            kv = ops.alloc_kv(_spec(ops), table.shape[1] + 1)
            lost = drawn.attend(ops, kv, table, 0, LENGTH, **options)
            assert (lost.float() - expected).pow(2).mean() > 2 * (found.float() - expected).pow(
                2
            ).mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_has_its_bits_in_pieces_after_moves_and_by_export(
    make: Make, dtype: torch.dtype
) -> None:
    ops, drawn = make(dtype, 32), Drawn(dtype, BIAS)
    table = _table(ops)
    blocks = table.shape[1] + 1
    spec = _spec(ops, ((7, 27), (3,)))
    whole = drawn.attend(ops, ops.alloc_kv(spec, blocks), table, 0, LENGTH)

    kv = ops.alloc_kv(spec, 2 * blocks)
    for start, end in ((0, 1), (1, 50), (50, 131), (131, 290)):
        assert torch.equal(drawn.attend(ops, kv, table, start, end), whole[start:end])
    # To the host and back to other blocks, then to places beside, then out as bytes and into another cache.
    host, used = ops.alloc_host_kv(spec, blocks), torch.arange(1, blocks)
    ops.swap_blocks(kv, host, used, used - 1)
    ops.scrub(kv, torch.arange(ops.block_size, blocks * ops.block_size))
    ops.swap_blocks(host, kv, used - 1, used + blocks - 1)
    ops.copy_blocks(kv, used + blocks - 1, used)
    other = ops.alloc_kv(spec, blocks)
    for block in range(1, blocks):
        exported = ops.export_block(kv, block)
        assert all(part.dtype == torch.uint8 for part in exported)
        ops.import_block(other, block, *exported)
        assert all(map(torch.equal, exported, ops.export_block(other, block)))
    for cache in (kv, other):
        assert torch.equal(drawn.attend(ops, cache, table, 290, LENGTH), whole[290:])


def test_scrubbed_tokens_have_no_scale(make: Make) -> None:
    ops, drawn = make(torch.float32), Drawn(torch.float32)
    table = _table(ops)
    kv = ops.alloc_kv(_spec(ops), table.shape[1] + 1)
    right = drawn.attend(ops, kv, table, 0, 20).clone()
    spoilt = drawn.k[20].clone()
    drawn.k[20, :, 3] = float("nan")
    assert drawn.attend(ops, kv, table, 20, 21).isnan().all()
    assert torch.equal(drawn.attend(ops, kv, table, 0, 20), right)
    slot = table[0, 1].long() * ops.block_size + 4
    ops.scrub(kv, slot[None])
    keys, values = ops.gather(kv, table[0], 21)
    assert not keys[20].any() and not values[20].any()
    drawn.k[20] = spoilt
    assert drawn.attend(ops, kv, table, 20, 21).isfinite().all()


def test_a_cache_of_codes_takes_about_half(make: Make) -> None:
    ops = make(torch.bfloat16)
    for size in (64, 128):
        numbers = KVSpec(8, size, size, torch.bfloat16)
        codes = KVSpec(8, size, size, torch.bfloat16, coded=True)
        ratio = ops.block_bytes(numbers) / ops.block_bytes(codes)
        assert ratio > 1.88
        kv = ops.alloc_kv(codes, 3)
        assert kv.k.nbytes + kv.v.nbytes == 3 * ops.block_bytes(codes)
    assert rows_are_equal(ops)


def test_both_of_a_pair_are_kept_however_they_are_rotated() -> None:
    bias = torch.zeros(2, 8)
    bias[1, 2], bias[1, 3] = -9, 8
    assert kept_elements(bias.flatten(), 2) == ((), (2, 6))
    assert kept_elements(bias.flatten(), 2, ("half", "next")) == ((), (2, 3, 6))
    assert kept_elements(bias.clamp(-8, 8).flatten(), 2) == ()
    assert kept_elements(None, 2) == ()
