"""Each device's ops against the plain reference, and every bit against the batch around it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from services.decoder.devices.base.hidden_keys import hidden_keys
from services.decoder.devices.base.ops import BaseOps
from services.decoder.devices.base.row_check import rows_are_equal
from services.decoder.devices.cpu.ops import CpuOps
from services.decoder.devices.cpu.torch_ops import TorchCpuOps
from services.decoder.devices.cuda.ops import CudaOps
from services.decoder.steps.attention_meta import HeadNorms, Heads, KVSpec, PagedKV
from services.decoder.steps.slot_state import LayerState, StateTensor
from shared.cpu_kernels.instruction_sets import InstructionSet
from shared.weights.linear_weight import in_memory
from tests.support.decoder.instruction_sets import each, open_kernels
from tests.support.decoder.paged_rows import LENGTHS, ROWS, Cache, Row

CPU = torch.device("cpu")

# How a table of ops is made of a device, a type and the size of a block.
Kind = Callable[..., BaseOps]


@dataclass(frozen=True)
class OwnKernels:
    """Ops by the kernels in C++ for one instruction set. Test machines have a compiler, or the kernels are not
    tested."""

    known: InstructionSet

    def __call__(
        self, device: torch.device, dtype: torch.dtype, block_size: int = 16, threads: int = 2
    ) -> BaseOps:
        return CpuOps(dtype, open_kernels(self.known, threads), block_size)

    @property
    def __name__(self) -> str:
        return self.known.name


OWN = each(OwnKernels)


def invariant(kind: Kind, dtype: torch.dtype, threads: int) -> BaseOps:
    """Ops whose rows do not depend on the batch, with so many threads; skips those that a library keeps
    from it here, which the check at start would find too."""
    if isinstance(kind, OwnKernels):
        return kind(CPU, dtype, threads=threads)
    torch.set_num_threads(threads)
    ops = kind(CPU, dtype)
    if not rows_are_equal(ops):
        pytest.skip("torch's library rounds by the number of rows on this processor")
    return ops


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Torch's threads as they were."""
    yield
    torch.set_num_threads(1)


INVARIANT = [
    *(
        pytest.param(*own.values, dtype, marks=own.marks)
        for dtype in (torch.float32, torch.bfloat16)
        for own in OWN
    ),
    (TorchCpuOps, torch.float32),
]


@pytest.mark.parametrize("kind", [*OWN, TorchCpuOps, CudaOps])
@pytest.mark.parametrize("heads", [Heads(4, 4, 16), Heads(14, 2, 64), Heads(6, 3, 8)])
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("size", [16, 128])
def test_attention_is_that_of_the_reference(
    kind: Kind, heads: Heads, window: int | None, size: int
) -> None:
    found = Cache(kind(CPU, torch.float32, block_size=size), heads, LENGTHS).attend(
        ROWS, window=window
    )
    expected = Cache(BaseOps(CPU, torch.float32, size), heads, LENGTHS).attend(ROWS, window=window)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [*OWN, TorchCpuOps, CudaOps])
def test_attention_in_bfloat16(kind: Kind) -> None:
    heads = Heads(8, 2, 32)
    found = Cache(kind(CPU, torch.bfloat16), heads, LENGTHS).attend(ROWS)
    expected = Cache(BaseOps(CPU, torch.bfloat16), heads, LENGTHS).attend(ROWS)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.03, atol=0.03)


def test_the_reference_is_attention_as_torch_has_it() -> None:
    heads = Heads(4, 2, 16)
    cache = Cache(BaseOps(CPU, torch.float32), heads, [90])
    [found] = cache.attend([Row(0, 90, 90)])
    k, v = cache.ops.gather(cache.kv, torch.from_numpy(cache.tables[0]), 90)
    expected = torch.nn.functional.scaled_dot_product_attention(
        cache.queries[0][:90].transpose(0, 1),
        k.transpose(0, 1).repeat_interleave(2, 0),
        v.transpose(0, 1).repeat_interleave(2, 0),
        is_causal=True,
        scale=0.3,
    ).transpose(0, 1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [*OWN, TorchCpuOps, CudaOps])
def test_caps_and_sinks_are_those_of_the_reference(kind: Kind) -> None:
    heads = Heads(4, 2, 16)
    for options in ({"softcap": 5.0}, {"sinks": torch.linspace(-1, 1, 4)}):
        found = Cache(kind(CPU, torch.float32), heads, [40]).attend([Row(0, 40, 40)], **options)
        plain = Cache(BaseOps(CPU, torch.float32), heads, [40]).attend([Row(0, 40, 40)], **options)
        without = Cache(BaseOps(CPU, torch.float32), heads, [40]).attend([Row(0, 40, 40)])
        torch.testing.assert_close(found[0], plain[0], rtol=1e-4, atol=1e-5)
        assert not torch.allclose(found[0], without[0], rtol=1e-2)


@pytest.mark.parametrize("kind", [*OWN, TorchCpuOps, CudaOps])
@pytest.mark.parametrize("chunk", [16, 48, 100, 4096])
def test_a_chunk_sees_nothing_of_those_before_it(kind: Kind, chunk: int) -> None:
    heads = Heads(4, 2, 16)
    cache = Cache(kind(CPU, torch.float32), heads, LENGTHS)
    found = cache.attend(ROWS, chunk=chunk)
    expected = Cache(BaseOps(CPU, torch.float32), heads, LENGTHS).attend(ROWS, chunk=chunk)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    if chunk < LENGTHS[3]:  # the first token of a chunk sees itself alone
        [first] = cache.attend([Row(3, chunk + 1, 1)], chunk=chunk)
        _, values = cache.ops.gather(cache.kv, torch.from_numpy(cache.tables[3]), chunk + 1)
        torch.testing.assert_close(first[0], values[-1].repeat_interleave(2, 0))


@pytest.mark.parametrize("kind", [*OWN, TorchCpuOps, CudaOps])
@pytest.mark.parametrize("window", [None, 33])
def test_spans_see_themselves_whole(kind: Kind, window: int | None) -> None:
    heads = Heads(4, 2, 16)
    # In ROWS, in their order in the batch: two spans of a row, one that began before it, and one of all it has.
    spans = [(3, 20, 75), (3, 100, 290), (4, 30, 41), (5, 0, 5)]
    found = Cache(kind(CPU, torch.float32), heads, LENGTHS).attend(ROWS, spans=spans, window=window)
    reference = Cache(BaseOps(CPU, torch.float32), heads, LENGTHS)
    expected = reference.attend(ROWS, spans=spans, window=window)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    causal = reference.attend(ROWS, window=window)
    assert not torch.allclose(expected[3][20:74], causal[3][20:74], rtol=1e-2)
    torch.testing.assert_close(expected[3][:20], causal[3][:20])


def test_a_window_holds_inside_a_span() -> None:
    """As transformers has it: what is older than the window is not seen, whatever lies in one span with it."""
    meta = BaseOps(CPU, torch.float32).make_meta(
        [6],
        [6],
        torch.zeros((1, 1), dtype=torch.int32),
        torch.zeros(6, dtype=torch.int64),
        [(0, 1, 6)],
    )
    seen = (~hidden_keys(meta, 0, 3)).int().tolist()
    assert seen == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 1],
        [0, 1, 1, 1, 1, 1],
        [0, 0, 1, 1, 1, 1],
        [0, 0, 0, 1, 1, 1],
    ]


@pytest.mark.parametrize("heads", [Heads(4, 4, 16), Heads(14, 2, 64), Heads(6, 2, 40)])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("kind", "dtype"), INVARIANT)
def test_attention_rows_are_bit_equal_in_any_batch(
    kind: Kind, dtype: torch.dtype, heads: Heads, threads: int
) -> None:
    lengths = [33, 64, 200, 520, 1100]
    cache = Cache(invariant(kind, dtype, threads), heads, lengths)
    whole = {i: cache.attend([Row(i, n, n)])[0] for i, n in enumerate(lengths)}
    single = [Row(i, n, 1) for i, n in enumerate(lengths)]
    for out, row in zip(cache.attend(single), single, strict=True):
        assert torch.equal(out[0], whole[row.sequence][-1])
    for row in single:
        [alone] = cache.attend([row], extra_width=40)
        assert torch.equal(alone[0], whole[row.sequence][-1])
    chunks = [Row(0, 20, 20), Row(1, 50, 7), Row(2, 150, 100), Row(3, 520, 200), Row(4, 900, 3)]
    for out, row in zip(cache.attend(chunks), chunks, strict=True):
        assert torch.equal(out, whole[row.sequence][row.length - row.count : row.length])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "sizes", [(64, 96), (256, 1152), (896, 1152), (576, 256), (100, 50), (6300, 34)]
)
@pytest.mark.parametrize("bias", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize(("kind", "dtype"), INVARIANT)
def test_linear_rows_are_bit_equal_in_any_batch(
    kind: Kind, dtype: torch.dtype, threads: int, sizes: tuple[int, int], bias: bool
) -> None:
    ops = invariant(kind, dtype, threads)
    torch.manual_seed(0)
    weight, shift = torch.randn(sizes[1], sizes[0]), torch.randn(sizes[1])
    packed = ops.pack(in_memory(weight, shift if bias else None))
    gates = ops.pack_gate_up(in_memory(weight, shift if bias else None))
    gelu = ops.pack_gelu(in_memory(weight, shift if bias else None))
    x = torch.randn(130, sizes[0]).to(dtype)
    for layer, function in (
        (packed, ops.linear), (packed, ops.linear_float32), (gates, ops.gate_up_swiglu),
        (gelu, ops.linear_gelu),
    ):  # fmt: skip
        expected = function(x, layer)
        for rows in [*range(1, 40), 63, 64, 65, 100]:
            assert torch.equal(function(x[:rows].contiguous(), layer), expected[:rows]), rows
            last = x[130 - rows :].contiguous()
            assert torch.equal(function(last, layer), expected[130 - rows :]), rows


@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "sizes", [(64, 96), (33, 70), (896, 1152), (576, 33 * 2), (5, 2), (6300, 34)]
)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_layers_are_those_of_the_reference(
    own: Kind, dtype: torch.dtype, sizes: tuple[int, int], bias: bool
) -> None:
    torch.manual_seed(0)
    weight, shift = torch.randn(sizes[1], sizes[0]) / sizes[0] ** 0.5, torch.randn(sizes[1])
    close: dict[str, Any] = (
        {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    )
    for rows in (1, 7, 12, 13, 150):
        x = torch.randn(rows, sizes[0]).to(dtype)
        found, expected = list[torch.Tensor](), list[torch.Tensor]()
        for ops, results in ((own(CPU, dtype), found), (BaseOps(CPU, dtype), expected)):
            packed = ops.pack(in_memory(weight, shift if bias else None))
            gates = ops.pack_gate_up(in_memory(weight, shift if bias else None))
            results += [ops.linear(x, packed), ops.linear_float32(x, packed)]
            gelu = ops.pack_gelu(in_memory(weight, shift if bias else None))
            results += [ops.gate_up_swiglu(x, gates), ops.linear_gelu(x, gelu)]
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(ours, theirs, **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [*OWN, TorchCpuOps, CudaOps])
def test_the_largest_is_found_without_the_rest(kind: Kind, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ops = kind(CPU, dtype)
    weight, shift = torch.randn(5003, 64), torch.randn(5003)
    weight[4000], shift[4000] = weight[7], shift[7]  # equal to an earlier one
    packed = ops.pack(in_memory(weight, shift))
    x = torch.randn(40, 64).to(dtype)
    x[3] = weight[7].to(dtype)
    logits = ops.linear_float32(x, packed).numpy()
    tokens, values = ops.largest(x, packed)
    assert tokens.tolist() == logits.argmax(1).tolist()
    assert values.tolist() == logits.max(1).tolist()
    assert tokens[3] == 7
    x[5, 1] = float("nan")
    _, poisoned = ops.largest(x, packed)
    assert poisoned.isnan().tolist() == [row == 5 for row in range(40)]


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("kind", "dtype"), INVARIANT)
def test_small_ops_are_bit_equal_in_any_batch_and_right(
    kind: Kind, dtype: torch.dtype, threads: int
) -> None:
    torch.manual_seed(0)
    ops, plain = invariant(kind, dtype, threads), BaseOps(CPU, dtype)
    heads, inner = Heads(6, 2, 24), 1001
    x, weight = torch.randn(200, 193).to(dtype), torch.randn(193).to(dtype)
    shift = torch.randn(193).to(dtype)
    gate_up = (torch.randn(200, 2 * inner) * 4).to(dtype)
    rows = torch.randn(200, 8, heads.size).to(dtype)
    norms = HeadNorms(torch.randn(heads.size).to(dtype), torch.randn(heads.size).to(dtype), 1e-6)
    angles = torch.randn(200, 1, heads.size)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    close: dict[str, Any] = (
        {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.03, "atol": 0.03}
    )
    for function, reference, arguments in (
        (lambda a: ops.head_norms(a, heads, norms),
         lambda a: plain.head_norms(a, heads, norms), (rows,)),
        (lambda a: ops.rms_norm(a, weight, 1e-5),
         lambda a: plain.rms_norm(a, weight, 1e-5), (x,)),
        (lambda a: ops.layer_norm(a, weight, shift, 1e-5),
         lambda a: plain.layer_norm(a, weight, shift, 1e-5), (x,)),
        (ops.swiglu, plain.swiglu, (gate_up,)),
        (ops.rope, plain.rope, (rows, cos, sin)),
        (lambda a, b: ops.add_rms_norm(a.clone(), b.clone(), weight, 1e-5)[0],
         lambda a, b: plain.add_rms_norm(a, b, weight, 1e-5)[0], (x, x.flip(0))),
    ):  # fmt: skip
        whole = function(*arguments)
        torch.testing.assert_close(whole, reference(*arguments), **close)
        for part in (slice(0, 1), slice(7, 8), slice(3, 40), slice(50, 199)):
            some = function(*(a[part].contiguous() for a in arguments))
            assert torch.equal(some, whole[part]), part


@pytest.mark.parametrize("kind", [BaseOps, *OWN, TorchCpuOps, CudaOps])
@pytest.mark.parametrize("size", [16, 128])
def test_blocks_go_out_and_in(kind: Kind, size: int) -> None:
    ops = kind(CPU, torch.float32, block_size=size)
    spec = KVSpec(2, 8, 8, torch.float32)
    cache, host = ops.alloc_kv(spec, 6), ops.alloc_host_kv(spec, 3)
    k, v = torch.randn(size, 2, 8), torch.randn(size, 2, 8)
    ops.import_block(cache, 2, k, v)
    ops.copy_blocks(cache, torch.tensor([2]), torch.tensor([4]))
    ops.swap_blocks(cache, host, torch.tensor([4]), torch.tensor([1]))
    ops.import_block(cache, 4, torch.zeros_like(k), torch.zeros_like(v))
    ops.swap_blocks(host, cache, torch.tensor([1]), torch.tensor([5]))
    for block in (2, 5):
        found = ops.export_block(cache, block)
        assert torch.equal(found[0], k) and torch.equal(found[1], v)
    assert not ops.export_block(cache, 4)[0].any()
    ops.scrub(cache, torch.tensor([5 * size + 3]))
    scrubbed = ops.export_block(cache, 5)[0]
    assert not scrubbed[3].any() and torch.equal(scrubbed[4:], k[4:])


@pytest.mark.parametrize("kind", [BaseOps, *OWN, TorchCpuOps, CudaOps])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_is_read_from_one_place_and_kept_in_another(kind: Kind, dtype: torch.dtype) -> None:
    ops = kind(CPU, dtype)
    specs = (StateTensor((2, 5), dtype), StateTensor((3,), torch.float32))
    tensors = ops.alloc_state(specs, 4)
    assert [(x.shape, x.dtype) for x in tensors] == [((4, 2, 5), dtype), ((4, 3), torch.float32)]
    assert [spec.nbytes for spec in specs] == [x[0].nbytes for x in tensors]
    some = [torch.randn(2, *spec.shape, dtype=spec.dtype) for spec in specs]
    begin = LayerState(tensors, torch.tensor([0, 0]), torch.tensor([3, 1]))
    assert not any(x.any() for x in ops.read_state(begin))
    ops.write_state(begin, some)
    after = LayerState(tensors, torch.tensor([1, 3]), torch.tensor([2, 2]))
    assert all(map(torch.equal, ops.read_state(after), [x.flip(0) for x in some]))
    assert not any(x[[0, 2]].any() for x in tensors)


@pytest.mark.parametrize("kind", [*OWN, TorchCpuOps, CudaOps])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("size", [16, 128])
def test_fused_rows_are_split_turned_and_written(kind: Kind, normed: bool, size: int) -> None:
    heads, tokens = Heads(4, 2, 8), 5
    torch.manual_seed(0)
    norms = HeadNorms(torch.randn(8), torch.randn(8), 1e-5) if normed else None
    qkv = torch.randn(tokens, 8 * 8)
    cos, sin = torch.randn(tokens, 1, 8), torch.randn(tokens, 1, 8)
    results = []
    for ops in (kind(CPU, torch.float32, block_size=size), BaseOps(CPU, torch.float32, size)):
        kv: PagedKV = ops.alloc_kv(KVSpec(2, 8, 8, torch.float32), 3)
        slots = torch.tensor([1, 2, size + 8, size + 9, 3]) + size
        meta = ops.make_meta([5], [5], torch.ones((1, 1), dtype=torch.int32), slots)
        q, k, v = ops.qkv_rope_write(qkv.clone(), cos, sin, heads, kv, meta, norms)
        assert torch.equal(ops.export_block(kv, 1)[0][[1, 2, 3]], k[[0, 1, 4]])
        assert torch.equal(ops.export_block(kv, 2)[1][[8, 9]], v[[2, 3]])
        results.append((q, k, v))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", [*OWN, TorchCpuOps, CudaOps])
def test_what_lies_behind_the_mask_does_not_matter(kind: Kind) -> None:
    ops = kind(CPU, torch.float32)
    cache = Cache(ops, Heads(4, 2, 16), [ops.block_size + 4, 40])
    rows = [Row(0, ops.block_size + 4, 1), Row(1, 40, 1)]
    before = cache.attend(rows)
    big = torch.full((cache.ops.block_size, 2, 16), 1e30)
    k, v = cache.ops.export_block(cache.kv, int(cache.tables[0][1]))
    k[4:], v[4:] = big[4:], big[4:]
    cache.ops.import_block(cache.kv, int(cache.tables[0][1]), k, v)
    cache.ops.import_block(cache.kv, 0, big, big)
    for old, new in zip(before, cache.attend(rows), strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("own", OWN)
def test_the_check_at_start_finds_that_rows_keep_their_bits(own: Kind, dtype: torch.dtype) -> None:
    assert rows_are_equal(own(CPU, dtype))


def test_the_check_at_start_finds_rows_that_depend_on_the_batch() -> None:
    assert not rows_are_equal(BaseOps(CPU, torch.float32))
