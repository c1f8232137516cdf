"""Each operation of an NPU gives what the reference gives."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_npu
from torch import Tensor

from services.decoder.devices.base.ops import BaseOps
from services.decoder.devices.npu import ops as npu_ops
from services.decoder.devices.npu.device import NpuDevice
from services.decoder.devices.npu.forms import Heads as NpuHeads
from services.decoder.devices.npu.forms import Writing
from services.decoder.models.rope import rope_table
from services.decoder.steps.attention_meta import Heads, KVSpec
from shared.model_config.rope import RopeConfig
from shared.weights.linear_weight import in_memory
from tests.ascend.simulator import counters
from tests.ascend.simulator.kernels import fused_attention
from tests.ascend.support import largest_difference, random

CPU = torch.device("cpu")
HALF = torch.float16


@pytest.fixture(scope="module")
def device() -> NpuDevice:
    return NpuDevice(HALF)


class Pair:
    """The same cache on the NPU and, for the reference, on the host."""

    def __init__(self, device: NpuDevice, spec: KVSpec, blocks: int) -> None:
        self.ops, self.plain = device.ops, BaseOps(CPU, HALF, 128)
        self.kv, self.expected = self.ops.alloc_kv(spec, blocks), self.plain.alloc_kv(spec, blocks)
        for block in range(blocks):
            k = random(128, spec.num_kv_heads, spec.k_size, seed=2 * block)
            v = random(128, spec.num_kv_heads, spec.v_size, seed=2 * block + 1)
            self.ops.import_block(self.kv, block, k, v)
            self.plain.import_block(self.expected, block, k, v)

    def attention(
        self, num_q: int, counts: list[int], keys: list[int], spans: Any = None, **options: Any
    ) -> float:
        """The largest difference of a step of these rows."""
        width = -(-max(keys) // 128)
        table = torch.arange(1, len(keys) * width + 1, dtype=torch.int32).view(len(keys), width)
        size = self.expected.k.shape[-1]
        q = random(sum(counts), num_q, size)
        v = random(sum(counts), 1, self.expected.v.shape[-1])
        found = []
        for ops, kv in ((self.ops, self.kv), (self.plain, self.expected)):
            slots = torch.arange(len(q)).to(ops.device)
            meta = ops.make_meta(counts, keys, table.to(ops.device), slots, spans)
            given = {name: _sent(value, ops.device) for name, value in options.items()}
            rows = q.to(ops.device)
            out = ops.paged_attention(
                rows, rows, v.to(ops.device), kv, meta, scale=size**-0.5, **given
            )
            found.append(out)
        return largest_difference(*found)


def _sent(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


@pytest.mark.parametrize("size", [16, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("heads", [(4, 2), (3, 1)])
def test_attention_over_pages(device: NpuDevice, size: int, heads: tuple[int, int]) -> None:
    pair = Pair(device, KVSpec(heads[1], size, size, HALF), 13)
    assert pair.attention(heads[0], [1, 1, 7, 140], [1, 300, 260, 140]) < 0.01
    form = device.ops.forms.form(NpuHeads(heads[0], *device.ops.cached_heads(pair.kv)))
    assert form is not None and form.name == "TND"  # one call for all rows, whatever the size


@pytest.mark.parametrize(
    "options",
    [
        {"window": 130},
        {"window": 1},
        {"softcap": 3.0},
        {"chunk": 128},
        {"sinks": random(4, seed=9)},
        {"window": 130, "sinks": random(4, seed=9)},
    ],
    ids=str,
)
def test_attention_with_what_some_models_ask_for(
    device: NpuDevice, options: dict[str, Any]
) -> None:
    pair = Pair(device, KVSpec(2, 64, 64, HALF), 13)
    assert pair.attention(4, [1, 1, 7, 140], [1, 300, 260, 140], **options) < 0.01


@pytest.mark.parametrize(
    ("window", "sizes", "found"),
    [
        (None, [64, 128, 192, 256], "TND"),
        (130, [64, 128, 192, 256], "TND"),
        (None, [64, 128, 192], "BSND"),
        (130, [64, 128, 192], None),
    ],
)
def test_heads_of_256_by_newer_and_older_releases(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    window: int | None,
    sizes: list[int],
    found: str | None,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where nothing is known of this release
    monkeypatch.setattr(fused_attention, "TND_SIZES", sizes)
    device = NpuDevice(HALF)
    pair = Pair(device, KVSpec(2, 256, 256, HALF), 13)
    assert pair.attention(4, [1, 1, 7, 140], [1, 300, 260, 140], window=window) < 0.01
    form = device.ops.forms.form(NpuHeads(4, 2, 256, window is not None))
    assert (form and form.name) == found


def test_a_kernel_may_count_windows_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that counts the query itself among the tokens before it is called so that it sees as many."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where nothing is known of this kernel
    kernel = torch_npu.npu_fused_infer_attention_score

    def counting(*tensors: Tensor, **given: Any) -> Any:
        return kernel(*tensors, **{**given, "pre_tokens": given["pre_tokens"] - 1})

    monkeypatch.setattr(torch_npu, "npu_fused_infer_attention_score", counting)
    device = NpuDevice(HALF)
    pair = Pair(device, KVSpec(2, 64, 64, HALF), 13)
    assert pair.attention(4, [1, 1, 7, 140], [1, 300, 260, 140], window=130) < 0.01
    form = device.ops.forms.form(NpuHeads(4, 2, 64, window=True))
    assert form is not None and form.name == "TND+1"


@pytest.mark.parametrize("window", [None, 60])
def test_spans_that_see_each_other_whole(device: NpuDevice, window: int | None) -> None:
    pair = Pair(device, KVSpec(2, 64, 64, HALF), 13)
    spans = [(2, 250, 258), (3, 0, 20), (3, 50, 130)]
    assert pair.attention(4, [1, 1, 20, 140], [1, 300, 260, 140], spans, window=window) < 0.01


def test_values_may_be_smaller_than_keys(device: NpuDevice) -> None:
    pair = Pair(device, KVSpec(2, 96, 64, HALF), 13)
    assert pair.attention(4, [1, 30], [300, 30]) < 0.01


@pytest.mark.parametrize("size", [64, 80])
def test_rows_are_turned_and_written(device: NpuDevice, size: int) -> None:
    heads = Heads(4, 2, size)
    table = rope_table(RopeConfig("default", 1e4, size, size, 64), 64, HALF)
    qkv = random(5, 8 * size)
    results = []
    for ops in (device.ops, BaseOps(CPU, HALF, 128)):
        cos, sin = (values[:5] for values in ops.rotary_table(*table))
        kv = ops.alloc_kv(KVSpec(2, size, size, HALF), 3)
        slots = (torch.tensor([1, 2, 136, 137, 3]) + 128).to(ops.device)
        one = torch.ones((1, 1), dtype=torch.int32, device=ops.device)
        meta = ops.make_meta([5], [5], one, slots)
        turned = ops.qkv_rope_write(qkv.to(ops.device, copy=True), cos, sin, heads, kv, meta)
        results.append((*turned, *ops.export_block(kv, 1), *ops.export_block(kv, 2)))
    for ours, theirs in zip(*results, strict=True):
        assert largest_difference(ours, theirs) < 0.01


def write_elsewhere(
    k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, cache_mode: str = ""
) -> None:
    """A kernel that has another layout in mind: all tokens of a head one behind the other."""
    block, place = (slots // 128).long(), (slots % 128).long()
    for cache, rows in ((keys, k), (values, v)):
        cache.view(len(cache), rows.shape[1], 128, -1)[block, :, place] = rows


@pytest.mark.parametrize(
    ("wrong", "taken"),
    [
        ([], "reshape_and_cache"),
        (["_npu_reshape_and_cache"], "scatter_pa"),
        (["_npu_reshape_and_cache", "npu_scatter_pa_kv_cache"], "index_put"),
    ],
)
def test_keys_are_written_by_the_first_operator_that_is_right(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wrong: list[str], taken: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where nothing is known of these kernels
    for name in wrong:
        monkeypatch.setattr(torch_npu, name, write_elsewhere)
    test_rows_are_turned_and_written(device := NpuDevice(HALF), 64)
    found = device.ops.forms.form(Writing(2, 64))
    assert found is not None and found.name == taken


def test_without_nnal_keys_are_written_by_cann(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu_ops, "atb_fault", lambda: "libatb.so: cannot open shared object file")
    names = [form.name for form in NpuDevice(HALF).ops.known_forms(Writing(2, 64))]
    assert names == ["scatter_pa", "index_put"]


def test_blocks_go_out_and_in_without_being_waited_for(device: NpuDevice) -> None:
    ops, spec = device.ops, KVSpec(2, 80, 80, HALF)
    cache, host = ops.alloc_kv(spec, 8), ops.alloc_host_kv(spec, 3)
    k, v = random(128, 2, 80, seed=1), random(128, 2, 80, seed=2)
    ops.import_block(cache, 2, k, v)
    ops.import_block(cache, 3, v, k)
    src, dst = device.upload(torch.tensor([2, 3]).numpy(), torch.tensor([4, 5]).numpy())
    zeros = torch.zeros_like(k).to(ops.device)
    slot = device.upload(torch.tensor([7 * 128 + 3]).numpy())[0]
    ops.scrub(cache, slot)  # the form of writing is found
    with counters.counted() as cost:
        ops.copy_blocks(cache, src, dst)
        ops.swap_blocks(cache, host, torch.tensor([4, 5]), torch.tensor([1, 2]))
        ops.import_block(cache, 4, zeros, zeros)
        ops.swap_blocks(host, cache, torch.tensor([1, 2]), torch.tensor([6, 7]))
        ops.scrub(cache, slot)
    assert not counters.synchronisations(cost)
    assert torch.equal(ops.export_block(cache, 6)[0].cpu(), k)
    last = ops.export_block(cache, 7)[0].cpu()
    assert not last[3].any() and torch.equal(last[4:], v[4:])
    assert not ops.export_block(cache, 4)[0].cpu().any()


def test_blocks_are_moved_wherever_they_go(device: NpuDevice) -> None:
    """Keys and values, of different sizes, of blocks that lie side by side in one place and apart in the other."""
    ops, spec = device.ops, KVSpec(2, 80, 48, HALF)
    cache, host = ops.alloc_kv(spec, 8), ops.alloc_host_kv(spec, 6)
    blocks = [(random(128, 2, 80, seed=n), random(128, 2, 48, seed=10 + n)) for n in range(4)]
    for number, (k, v) in enumerate(blocks):
        ops.import_block(cache, number, k, v)
    apart = torch.tensor([0, 2, 3, 5])
    ops.swap_blocks(cache, host, torch.arange(4), apart)
    ops.swap_blocks(host, cache, apart, torch.arange(4, 8))
    for number, block in enumerate(blocks):
        for ours, theirs in zip(ops.export_block(cache, 4 + number), block, strict=True):
            assert torch.equal(ours.cpu(), theirs)
    ops.scrub(cache, device.upload(np.array([5 * 128 + 3]))[0])
    for ours, theirs in zip(ops.export_block(cache, 5), blocks[1], strict=True):
        assert not ours[3].any()
        assert torch.equal(ours[4:].cpu(), theirs[4:]) and torch.equal(ours[:3].cpu(), theirs[:3])


def test_the_first_of_the_largest_is_found(device: NpuDevice) -> None:
    weight = random(503, 64)
    weight[400] = weight[7]
    packed = device.ops.pack(in_memory(weight))
    x = random(4, 64, seed=3)
    x[2] = weight[7]
    tokens, values = device.ops.largest(x.to("npu"), packed)
    expected = x.float() @ weight.float().T
    assert tokens.tolist() == expected.argmax(1).tolist()
    assert tokens[2] == 7
    assert largest_difference(values, expected.amax(1)) < 0.1


def test_small_operations(device: NpuDevice) -> None:
    ops, plain = device.ops, BaseOps(CPU, HALF, 128)
    x, residual, weight = random(5, 64), random(5, 64, seed=1), random(64, seed=2)
    for name, arguments in {
        "rms_norm": (x, weight, 1e-6),
        "add_rms_norm": (x, residual, weight, 1e-6),
        "layer_norm": (x, weight, residual[0], 1e-6),
        "swiglu": (x,),
    }.items():
        found = getattr(ops, name)(*(_sent(value, ops.device) for value in arguments))
        expected = getattr(plain, name)(*(_sent(value, CPU) for value in arguments))
        pairs = (
            zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
        )
        for ours, theirs in pairs:
            assert largest_difference(ours, theirs) < 0.01, name


def test_an_operation_waits_for_nothing(device: NpuDevice) -> None:
    """Not even where spans are cut out of the rows."""
    pair = Pair(device, KVSpec(2, 64, 64, HALF), 13)
    spans = [(1, 250, 258)]
    pair.attention(4, [1, 20], [300, 260], spans)  # the form is found
    ops = device.ops
    table = torch.ones((2, 3), dtype=torch.int32, device=ops.device)
    q, slots = random(21, 4, 64).to(ops.device), torch.arange(21).to(ops.device)
    ops.scrub(pair.kv, slots)  # and that of writing
    torch_npu.npu.synchronize()
    with counters.counted() as cost:
        meta = ops.make_meta([1, 20], [300, 260], table, slots, spans)
        ops.kv_write(q[:, :2], q[:, 2:], pair.kv, meta)
        ops.paged_attention(q, q, q, pair.kv, meta, scale=0.1)
    assert not counters.synchronisations(cost)
