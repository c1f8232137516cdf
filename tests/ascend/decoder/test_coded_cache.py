"""On an NPU keys and values of 8 bits say nearly what numbers say, whatever a row asks for and however its blocks are
moved."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu
from torch import Tensor

from services.decoder.devices.base.ops import BaseOps
from services.decoder.devices.npu.attention import coded_attention
from services.decoder.devices.npu.attention.coded_cache import CodedKV
from services.decoder.devices.npu.device import NpuDevice
from services.decoder.devices.npu.forms import CodedHeads, Writing
from services.decoder.devices.npu.ops import NpuOps
from services.decoder.steps.attention_meta import KVSpec, PagedKV
from shared.errors import InvalidRequest
from tests.ascend.simulator import counters
from tests.ascend.support import random

BLOCK, NUM_Q, NUM_KV = 128, 4, 2
BIAS = 200.0  # of a pair of elements of the first head's keys
COUNTS, LENGTHS = [1, 1, 7, 140], [1, 300, 260, 140]
WIDTH = 3  # blocks of a row
BLOCKS = WIDTH * len(COUNTS) + 1
HALF, BRAIN = torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def _nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


class Drawn:
    """Rows of random tokens, a bias on the keys of one pair, and what they see by the reference."""

    def __init__(self, dtype: torch.dtype, size: int, bias: float = 0.0, v_size: int = 0) -> None:
        self.dtype, self.size, self.v_size = dtype, size, v_size or size
        self.kept: tuple[tuple[int, ...], ...] = ((7, 7 + size // 2), ()) if bias else ()
        self.q = random(sum(LENGTHS), NUM_Q, size, dtype=dtype)
        self.k = random(sum(LENGTHS), NUM_KV, size, seed=1, dtype=dtype)
        self.v = random(sum(LENGTHS), NUM_KV, self.v_size, seed=2, dtype=dtype)
        if bias:  # turned by places, as rotations do
            turn = (1 + torch.arange(len(self.k)).cos() / 20).to(dtype)
            self.k[:, 0, 7] += bias * turn
            self.k[:, 0, 7 + size // 2] -= bias / 2 * turn
        self.table = torch.arange(BLOCKS - 1, 0, -1, dtype=torch.int32).view(-1, WIDTH)

    def spec(self, *, coded: bool = True) -> KVSpec:
        kept = self.kept if coded else ()
        return KVSpec(NUM_KV, self.size, self.v_size, self.dtype, coded=coded, kept=kept)

    def write(self, ops: BaseOps, kv: PagedKV, pieces: tuple[int, ...] = (128, 60, 1)) -> None:
        """Every row, in pieces of so many tokens in turn."""
        for row, length in enumerate(LENGTHS):
            start = turn = 0
            while start < length:
                end = min(length, start + pieces[turn % len(pieces)])
                places = torch.arange(start, end)
                blocks = self.table[row][places // BLOCK].long()
                slots = (blocks * BLOCK + places % BLOCK).to(ops.device)
                meta = ops.make_meta([end - start], [end], self.table[:1].to(ops.device), slots)
                part = slice(sum(LENGTHS[:row]) + start, sum(LENGTHS[:row]) + end)
                ops.kv_write(self.k[part].to(ops.device), self.v[part].to(ops.device), kv, meta)
                start, turn = end, turn + 1

    def attend(self, ops: BaseOps, kv: PagedKV, spans: Any = None, **options: Any) -> Tensor:
        """A step of the last tokens of each row."""
        ends = torch.tensor(LENGTHS).cumsum(0).tolist()
        some = torch.cat([torch.arange(end - n, end) for end, n in zip(ends, COUNTS, strict=True)])
        q, k, v = (x[some].to(ops.device) for x in (self.q, self.k, self.v))
        slots = torch.zeros(len(some), dtype=torch.int64, device=ops.device)
        meta = ops.make_meta(COUNTS, LENGTHS, self.table.to(ops.device), slots, spans)
        given: dict[str, Any] = {
            name: value.to(ops.device) if isinstance(value, Tensor) else value
            for name, value in options.items()
        }
        return ops.paged_attention(q, k, v, kv, meta, scale=self.size**-0.5, **given).cpu().float()

    def expected(self, *arguments: Any, **options: Any) -> Tensor:
        """By the reference, of numbers in float32."""
        exact = Drawn(torch.float32, self.size, v_size=self.v_size)
        exact.q, exact.k, exact.v = self.q.float(), self.k.float(), self.v.float()
        plain = BaseOps(torch.device("cpu"), torch.float32, BLOCK)
        kv = plain.alloc_kv(exact.spec(coded=False), BLOCKS)
        exact.write(plain, kv)
        return exact.attend(plain, kv, *arguments, **options)


def off(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt())


@pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=str)
@pytest.mark.parametrize(("size", "bias"), [(64, 0.0), (64, BIAS), (80, BIAS), (128, 0.0)])
def test_codes_say_nearly_what_numbers_say(dtype: torch.dtype, size: int, bias: float) -> None:
    """With biases as large as Qwen2's, too, whose elements have two digits."""
    ops, drawn = NpuDevice(dtype).ops, Drawn(dtype, size, bias)
    kv = ops.alloc_kv(drawn.spec(), BLOCKS)
    assert isinstance(kv, CodedKV) and kv.k.dtype == torch.int8
    drawn.write(ops, kv)
    found, expected = drawn.attend(ops, kv), drawn.expected()
    most = 0.03 if dtype == HALF or not bias else 0.1
    for rows in (slice(2), slice(2, None)):  # of single queries, and of others
        assert off(found[rows], expected[rows]) < most
    form = ops.forms.form(CodedHeads(NUM_Q, NUM_KV, size, kv.k.shape[-1], 2 if bias else 0))
    assert form == coded_attention.BSND
    parts = (kv.k, kv.v, kv.k_scales, kv.v_scales)
    assert sum(part.nbytes for part in parts) == BLOCKS * ops.block_bytes(drawn.spec())
    if bias:  # without that nothing is left of the other elements
        drawn.kept = ()
        lost = ops.alloc_kv(drawn.spec(), BLOCKS)
        drawn.write(ops, lost)
        assert off(drawn.attend(ops, lost), expected) > 2 * off(found, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 130},
        {"window": 1},
        {"softcap": 3.0},
        {"chunk": 128},
        {"sinks": random(NUM_Q, seed=9)},
        {"window": 130, "sinks": random(NUM_Q, seed=9)},
        {"spans": [(2, 250, 258), (3, 0, 20), (3, 50, 130)]},
        {"spans": [(2, 250, 258), (3, 50, 130)], "window": 60},
    ],
    ids=str,
)
def test_attention_with_what_some_models_ask_for(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """By the numbers that codes mean, of all rows at once, and of each row by itself."""
    ops, drawn = NpuDevice(HALF).ops, Drawn(HALF, 64, BIAS)
    kv = ops.alloc_kv(drawn.spec(), BLOCKS)
    drawn.write(ops, kv)
    expected = drawn.expected(**options)
    whole = drawn.attend(ops, kv, **options)
    assert off(whole, expected) < 0.02
    monkeypatch.setattr(coded_attention, "_MOST_AT_ONCE", 1)
    assert off(drawn.attend(ops, kv, **options), whole) < 0.001


def test_values_may_be_smaller_than_keys() -> None:
    ops, drawn = NpuDevice(HALF).ops, Drawn(HALF, 96, v_size=64)
    kv = ops.alloc_kv(drawn.spec(), BLOCKS)
    drawn.write(ops, kv)
    assert off(drawn.attend(ops, kv), drawn.expected()) < 0.02


def contents(ops: NpuOps, kv: PagedKV) -> list[Tensor]:
    """Of the blocks that rows use, in their order."""
    return [part.cpu() for block in range(1, BLOCKS) for part in ops.export_block(kv, block)]


def test_a_token_has_its_codes_in_pieces_after_moves_and_by_export() -> None:
    device = NpuDevice(HALF)
    ops, drawn = device.ops, Drawn(HALF, 80, BIAS)
    kv, other = (ops.alloc_kv(drawn.spec(), 2 * BLOCKS) for _ in range(2))
    drawn.write(ops, kv)
    drawn.write(ops, other, (1, 127, 2, 300))
    whole, result = contents(ops, kv), drawn.attend(ops, kv)
    assert all(part.dtype == torch.uint8 for part in whole)
    assert all(map(torch.equal, contents(ops, other), whole))
    # To the host and back to other blocks, then to places beside, then out as bytes and into another cache.
    host, used = ops.alloc_host_kv(drawn.spec(), BLOCKS), torch.arange(1, BLOCKS)
    slots = torch.arange(BLOCK, BLOCKS * BLOCK).to(ops.device)
    src, dst = device.upload((used + BLOCKS - 1).numpy(), used.numpy())
    torch_npu.npu.synchronize()
    with counters.counted() as cost:
        ops.swap_blocks(kv, host, used, used - 1)
        ops.scrub(kv, slots)
        ops.swap_blocks(host, kv, used - 1, used + BLOCKS - 1)
    assert not counters.synchronisations(cost)
    assert not any(part.any() for part in contents(ops, kv))
    ops.copy_blocks(kv, src, dst)
    moved = ops.alloc_kv(drawn.spec(), BLOCKS)
    for block in range(1, BLOCKS):
        ops.import_block(moved, block, *ops.export_block(kv, block))
    for cache in (kv, moved):
        assert all(map(torch.equal, contents(ops, cache), whole))
        assert torch.equal(drawn.attend(ops, cache), result)


def test_a_step_waits_for_nothing() -> None:
    ops, drawn = NpuDevice(HALF).ops, Drawn(HALF, 64, BIAS)
    kv = ops.alloc_kv(drawn.spec(), BLOCKS)
    drawn.write(ops, kv)
    drawn.attend(ops, kv, window=130)  # forms are found
    drawn.attend(ops, kv)
    table = drawn.table.to(ops.device)
    q, k, v = (x[:149].to(ops.device) for x in (drawn.q, drawn.k, drawn.v))
    slots = torch.arange(149).to(ops.device)
    torch_npu.npu.synchronize()
    with counters.counted() as cost:
        for window in (None, 130):
            meta = ops.make_meta(COUNTS, LENGTHS, table, slots)
            ops.kv_write(k, v, kv, meta)
            ops.paged_attention(q, k, v, kv, meta, scale=0.1, window=window)
    assert not counters.synchronisations(cost)


def test_scrubbed_tokens_have_no_scale() -> None:
    ops, drawn = NpuDevice(HALF).ops, Drawn(HALF, 64)
    drawn.k[1 + 20, :, 3] = float("nan")
    kv = ops.alloc_kv(drawn.spec(), BLOCKS)
    drawn.write(ops, kv)
    assert drawn.attend(ops, kv)[1].isnan().all()
    ops.scrub(kv, (drawn.table[1, :1].long() * BLOCK + 20).to(ops.device))
    keys, values = ops.gather(kv, drawn.table[1].to(ops.device), 21)
    assert not keys[20].any() and not values[20].any() and keys[19].any()
    assert drawn.attend(ops, kv).isfinite().all()


Fault = Callable[[dict[str, Any]], dict[str, Any]]


def changed(name: str, change: Callable[[Any], Any]) -> Fault:
    return lambda given: {**given, name: change(given[name])}


FAULTS: dict[str, Fault] = {
    "values have the scales of keys": lambda given: {
        **given,
        "value_antiquant_scale": given["key_antiquant_scale"],
    },
    "scales of one block": changed(
        "key_antiquant_scale", lambda x: x[:1].expand_as(x).contiguous()
    ),
    "scales of one head": changed(
        "key_antiquant_scale", lambda x: x[:, :1].expand_as(x).contiguous()
    ),
    "scales of one token": changed(
        "value_antiquant_scale", lambda x: x[..., :1].expand_as(x).contiguous()
    ),
    "the last key is not seen": changed(
        "actual_seq_lengths_kv", lambda lengths: [max(1, n - 1) for n in lengths]
    ),
    "no scale of scores": changed("scale", lambda _: 1.0),
}


def with_fault(monkeypatch: pytest.MonkeyPatch, fault: Fault, layouts: tuple[str, ...]) -> None:
    kernel = torch_npu.npu_fused_infer_attention_score

    def faulty(*tensors: Tensor, **given: Any) -> Any:
        is_hit = "key_antiquant_scale" in given and given["input_layout"] in layouts
        return kernel(*tensors, **(fault(given) if is_hit else given))

    monkeypatch.setattr(torch_npu, "npu_fused_infer_attention_score", faulty)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_where_no_form_is_right_the_flag_is_refused(
    monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    """By the first step, which is a prompt's, before anything is served."""
    with_fault(monkeypatch, fault, ("BSND", "BNSD"))
    ops, drawn = NpuDevice(HALF).ops, Drawn(HALF, 64)
    kv = ops.alloc_kv(drawn.spec(), BLOCKS)
    drawn.write(ops, kv)
    with pytest.raises(InvalidRequest, match=r"--kv-cache-dtype int8: no form.*2 heads of 64"):
        drawn.attend(ops, kv)


def test_the_second_form_is_taken_where_the_first_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_fault(monkeypatch, FAULTS["no scale of scores"], ("BSND",))
    ops, drawn = NpuDevice(HALF).ops, Drawn(HALF, 64)
    kv = ops.alloc_kv(drawn.spec(), BLOCKS)
    drawn.write(ops, kv)
    assert off(drawn.attend(ops, kv), drawn.expected()) < 0.02
    assert ops.forms.form(CodedHeads(NUM_Q, NUM_KV, 64, 64)) == coded_attention.BNSD


def test_an_operator_that_rounds_otherwise_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes are compared with what was written, not only with what attention makes of them."""
    quantize = torch_npu.npu_dynamic_quant

    def whole_rows(x: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = quantize(x)
        return codes, scales[:, :1].expand_as(scales).contiguous()

    monkeypatch.setattr(torch_npu, "npu_dynamic_quant", whole_rows)
    ops = NpuDevice(HALF).ops
    asked = CodedHeads(NUM_Q, NUM_KV, 64, 64)
    assert all(not ops.try_form(asked, form).agrees for form in ops.known_forms(asked))


@pytest.mark.parametrize("wrong", [[], ["_npu_reshape_and_cache"]], ids=str)
def test_codes_are_written_by_an_operator_that_is_right_for_them(
    monkeypatch: pytest.MonkeyPatch, wrong: list[str]
) -> None:
    """One that is right for numbers may not be."""
    for name in wrong:
        write = getattr(torch_npu, name)

        def not_bytes(k: Tensor, v: Tensor, *caches: Tensor, of: Any = write) -> None:
            if k.dtype != torch.int8:
                of(k, v, *caches)

        monkeypatch.setattr(torch_npu, name, not_bytes)
    ops = NpuDevice(HALF).ops
    form, of_codes = (ops.forms.form(Writing(2, 64, coded)) for coded in (False, True))
    assert form is not None and form.layout == "reshape_and_cache"
    assert of_codes is not None
    assert of_codes.layout == ("scatter_pa" if wrong else "reshape_and_cache")
    drawn = Drawn(HALF, 64)
    kv = ops.alloc_kv(drawn.spec(), BLOCKS)
    drawn.write(ops, kv)
    assert off(drawn.attend(ops, kv), drawn.expected()) < 0.02
