"""The custom ops of torch_npu: their results, and what they refuse."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import torch_npu
from torch import Tensor

from tests.ascend.simulator.errors import Refused
from tests.ascend.support import largest_difference, random

BLOCK, HEADS, KV_HEADS, SIZE = 128, 4, 2, 64
LENGTHS = [1, 127, 128, 129, 700]
MASK = torch.triu(torch.ones(2048, 2048), 1).to(torch.int8)


class Cache:
    """Keys and values of sequences of LENGTHS, in blocks and in a row."""

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        widths = [-(-n // BLOCK) for n in LENGTHS]
        self.table = torch.zeros(len(LENGTHS), max(widths), dtype=torch.int32)
        self.k, self.v = (
            torch.full((40, BLOCK, KV_HEADS, SIZE), float("nan"), dtype=dtype) for _ in "kv"
        )
        self.rows = []
        free = iter(torch.randperm(39, generator=torch.Generator().manual_seed(0)) + 1)
        for i, n in enumerate(LENGTHS):
            self.table[i, : widths[i]] = torch.tensor([next(free) for _ in range(widths[i])])
            k, v = (random(n, KV_HEADS, SIZE, seed=10 * i + j, dtype=dtype) for j in (0, 1))
            self.rows.append((k, v))
            for position in range(n):
                block = self.table[i, position // BLOCK]
                self.k[block, position % BLOCK], self.v[block, position % BLOCK] = (
                    k[position],
                    v[position],
                )

    def expected(self, query: Tensor, row: int, window: int | None = None) -> Tensor:
        k, v = self.rows[row]
        at = torch.arange(len(k) - len(query), len(k))[:, None]
        seen = torch.arange(len(k))[None] <= at
        if window is not None:
            seen &= torch.arange(len(k))[None] > at - window
        q, k, v = (x.float().transpose(0, 1) for x in (query, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.2, enable_gqa=True)
        return out.transpose(0, 1)

    def paged(self, **options: object) -> dict[str, object]:
        flat = {
            "key": self.k.view(40, BLOCK, -1).to("npu"),
            "value": self.v.view(40, BLOCK, -1).to("npu"),
        }
        common = {
            "num_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "scale": 0.2,
            "block_size": BLOCK,
        }
        return {**flat, **common, "block_table": self.table.to("npu"), **options}


@pytest.mark.parametrize("window", [None, 1, 130])
@pytest.mark.parametrize("counts", [[1, 1, 1, 1, 1], [1, 127, 1, 2, 300]], ids=["decode", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_packed_attention_over_a_paged_cache(
    dtype: torch.dtype, counts: list[int], window: int | None
) -> None:
    cache = Cache(dtype)
    query = random(sum(counts), HEADS, SIZE, seed=99, dtype=dtype)
    ends = torch.tensor(counts).cumsum(0).tolist()
    mode = (
        {"sparse_mode": 3}
        if window is None
        else {"sparse_mode": 4, "pre_tokens": window - 1, "next_tokens": 0}
    )
    options = cache.paged(
        input_layout="TND",
        actual_seq_lengths=ends,
        actual_seq_lengths_kv=LENGTHS,
        atten_mask=MASK.to("npu"),
        **mode,
    )
    out = torch_npu.npu_fused_infer_attention_score(query.to("npu"), **options)[0]
    for row, part in enumerate(query.split(counts)):
        found = out[ends[row] - counts[row] : ends[row]]
        assert largest_difference(found, cache.expected(part, row, window)) < 0.01


def test_packed_keys_are_one_sequence_after_the_other() -> None:
    counts = [5, 70]
    q, k, v = (random(75, HEADS, SIZE, seed=i).to("npu") for i in range(3))
    ends = [5, 75]
    out = torch_npu.npu_fused_infer_attention_score(
        q,
        k,
        v,
        num_heads=HEADS,
        scale=0.2,
        input_layout="TND",
        actual_seq_lengths=ends,
        actual_seq_lengths_kv=ends,
    )[0]
    for one, *others in zip(
        out.split(counts), q.split(counts), k.split(counts), v.split(counts), strict=True
    ):
        query, key, value = (x.cpu().float().transpose(0, 1) for x in others)
        expected = F.scaled_dot_product_attention(query, key, value, scale=0.2).transpose(0, 1)
        assert largest_difference(one, expected) < 0.01


def test_batched_decode_equals_packed() -> None:
    cache = Cache()
    query = random(len(LENGTHS), HEADS, SIZE, seed=99).to("npu")
    common = {"actual_seq_lengths_kv": LENGTHS}
    packed = torch_npu.npu_fused_infer_attention_score(
        query,
        **cache.paged(
            input_layout="TND",
            actual_seq_lengths=[1, 2, 3, 4, 5],
            atten_mask=MASK.to("npu"),
            sparse_mode=3,
            **common,
        ),
    )[0]
    batched = torch_npu.npu_fused_infer_attention_score(
        query[:, None], **cache.paged(input_layout="BSND", **common)
    )[0]
    assert torch.equal(packed.cpu(), batched[:, 0].cpu())


def test_sinks_take_weight_and_give_nothing() -> None:
    cache = Cache(torch.bfloat16)
    query = random(len(LENGTHS), HEADS, SIZE, seed=99, dtype=torch.bfloat16).to("npu")
    options = cache.paged()
    for old, new in {"num_heads": "num_query_heads", "scale": "softmax_scale"}.items():
        options[new] = options.pop(old)
    out = torch_npu.npu_fused_infer_attention_score_v2(
        query,
        **options,
        input_layout="TND",
        actual_seq_qlen=[1, 2, 3, 4, 5],
        actual_seq_kvlen=LENGTHS,
        atten_mask=MASK.to("npu"),
        sparse_mode=3,
        learnable_sink=torch.full((HEADS,), 100.0, dtype=torch.bfloat16, device="npu"),
    )[0]
    assert out.abs().max().item() < 1e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"actual_seq_lengths": [1, 2, 3, 4, 6]}, "561002"),
        ({"actual_seq_lengths": [1, 1, 1, 1, 1]}, "561002"),
        ({"actual_seq_lengths_kv": LENGTHS[:4]}, "561002"),
        ({"block_table": torch.zeros(4, 6, dtype=torch.int32)}, "561002"),
        ({"block_table": torch.zeros(5, 6, dtype=torch.int64)}, "int64"),
        ({"block_table": torch.zeros(5, 2, dtype=torch.int32)}, "too short"),
        ({"block_table": torch.full((5, 6), 40, dtype=torch.int32)}, "out of range"),
        ({"block_size": 16}, "keys"),
        ({"num_key_value_heads": 0}, "keys"),
        ({"atten_mask": MASK[:1024, :1024].contiguous()}, "2048"),
        ({"atten_mask": MASK.t().contiguous()}, "upper triangular"),
        ({"atten_mask": MASK.half()}, "mask"),
        ({"atten_mask": None}, "mask"),
        ({"query": random(5, HEADS, 80)}, "head size"),
        ({"query": random(HEADS, 5, SIZE).transpose(0, 1)}, "contiguous"),
        ({"query": random(5, HEADS, SIZE, dtype=torch.float32)}, "float32"),
    ],
)
def test_attention_refuses_what_its_documents_exclude(
    change: dict[str, object], message: str
) -> None:
    options = Cache().paged(
        query=random(5, HEADS, SIZE),
        input_layout="TND",
        actual_seq_lengths=[1, 2, 3, 4, 5],
        actual_seq_lengths_kv=LENGTHS,
        atten_mask=MASK,
        sparse_mode=3,
    )
    options.update(change)
    sent = {name: x.to("npu") if isinstance(x, Tensor) else x for name, x in options.items()}
    if "contiguous" in message:
        sent["query"] = random(HEADS, 5, SIZE).to("npu").transpose(0, 1)
    with pytest.raises(Refused, match=message):
        torch_npu.npu_fused_infer_attention_score(**sent)


def of_codes(cache: Cache) -> dict[str, Tensor]:
    """Keys and values of 8 bits, a scale for each token and head, that mean nearly what the cache has."""
    found = {}
    for name, part in (("key", cache.k), ("value", cache.v)):
        codes, scales = torch_npu.npu_dynamic_quant(part.nan_to_num().to("npu"))
        found[name] = codes.view(40, BLOCK, -1)
        found[f"{name}_antiquant_scale"] = scales.transpose(1, 2).contiguous()
    return found


def over_codes(query: Tensor, cache: Cache, **changes: object) -> Tensor:
    modes = {"key_antiquant_mode": 5, "value_antiquant_mode": 5, "input_layout": "BSND"}
    options = cache.paged(**of_codes(cache), **modes, actual_seq_lengths_kv=LENGTHS)
    out: Tensor = torch_npu.npu_fused_infer_attention_score(
        query.to("npu"), **{**options, **changes}
    )[0]
    return out.cpu()


def test_keys_of_8_bits_have_a_scale_for_each_token_and_head() -> None:
    cache, query = Cache(), random(len(LENGTHS), 1, HEADS, SIZE, seed=99)
    found = over_codes(query, cache)
    for row, part in enumerate(query):
        assert largest_difference(found[row], cache.expected(part, row)) < 0.05
    turned = over_codes(query.transpose(1, 2).contiguous(), cache, input_layout="BNSD")
    assert torch.equal(turned[:, :, 0], found[:, 0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key_antiquant_mode": 0, "value_antiquant_mode": 0}, "modes"),
        ({"value_antiquant_mode": 0}, "modes"),
        ({"value_antiquant_scale": None}, "without the other"),
        ({"key_antiquant_scale": torch.ones(40, KV_HEADS, BLOCK).half()}, "float16"),
        ({"key_antiquant_scale": torch.ones(40, BLOCK, KV_HEADS)}, "for blocks, heads and tokens"),
        ({"input_layout": "TND", "actual_seq_lengths": [1, 2, 3, 4, 5]}, "layout TND"),
        ({"query": random(5, 2, HEADS, SIZE)}, "queries of one token"),
        ({"key_antiquant_scale": None, "value_antiquant_scale": None}, "modes"),
    ],
)
def test_attention_over_codes_refuses_what_its_documents_exclude(
    changes: dict[str, object], message: str
) -> None:
    sent = {name: x.to("npu") if isinstance(x, Tensor) else x for name, x in changes.items()}
    query = sent.pop("query", random(5, 1, HEADS, SIZE))
    if sent.get("input_layout") == "TND":
        query = random(5, HEADS, SIZE)
    assert isinstance(query, Tensor)
    with pytest.raises(Refused, match=message):
        over_codes(query, Cache(), **sent)


def test_keys_and_values_are_written_to_their_slots() -> None:
    rows, slots = random(3, KV_HEADS, SIZE), torch.tensor([130, 255, 256], dtype=torch.int32)
    scatter = partial(torch_npu.npu_scatter_pa_kv_cache, cache_mode="Norm")
    for write in (scatter, torch_npu._npu_reshape_and_cache):
        k, v = (
            torch.zeros(4, BLOCK, KV_HEADS, SIZE, dtype=torch.float16, device="npu") for _ in "kv"
        )
        write(rows.to("npu"), rows.to("npu"), k, v, slots.to("npu"))
        for cache in (k, v):
            assert torch.equal(cache.cpu().view(-1, KV_HEADS, SIZE)[slots.long()], rows)
            assert cache.count_nonzero().item() == rows.count_nonzero()


@pytest.mark.parametrize(
    ("slots", "options", "message"),
    [
        ([1, 1, 2], {"cache_mode": "Norm"}, "unique"),
        ([1, 2, 512], {"cache_mode": "Norm"}, "range"),
        ([-1, 1, 2], {"cache_mode": "Norm"}, "negative"),
        ([1, 2, 3], {}, "PA_NZ"),
        ([1, 2], {"cache_mode": "Norm"}, "slots"),
    ],
)
def test_writing_refuses_what_would_go_wrong(
    slots: list[int], options: dict[str, str], message: str
) -> None:
    rows = random(3, KV_HEADS, SIZE).to("npu")
    k, v = (torch.zeros(4, BLOCK, KV_HEADS, SIZE, dtype=torch.float16, device="npu") for _ in "kv")
    places = torch.tensor(slots, dtype=torch.int32, device="npu")
    with pytest.raises(Refused, match=message):
        torch_npu.npu_scatter_pa_kv_cache(rows, rows, k, v, places, **options)


def test_a_tensor_of_the_cpu_among_arguments_is_refused() -> None:
    with pytest.raises((Refused, RuntimeError), match="device"):
        torch_npu.npu_rms_norm(random(4, SIZE).to("npu"), random(SIZE), 1e-5)


def test_norms() -> None:
    x, residual, weight = random(5, SIZE), random(5, SIZE, seed=1), random(SIZE, seed=2)
    expected = F.rms_norm(x.float(), (SIZE,), weight.float(), 1e-5)
    found = torch_npu.npu_rms_norm(x.to("npu"), weight.to("npu"), 1e-5)[0]
    assert largest_difference(found, expected) < 0.01
    y, _, total = torch_npu.npu_add_rms_norm(
        x.to("npu"), residual.to("npu"), weight.to("npu"), 1e-5
    )
    assert torch.equal(total.cpu(), x + residual)
    assert (
        largest_difference(y, F.rms_norm((x + residual).float(), (SIZE,), weight.float(), 1e-5))
        < 0.01
    )


def test_rotation_and_activation() -> None:
    x, angle = random(1, 5, HEADS, SIZE), random(1, 5, 1, SIZE // 2, seed=1, dtype=torch.float32)
    cos, sin = (torch.cat([part, part], -1).half() for part in (angle.cos(), angle.sin()))
    found = torch_npu.npu_rotary_mul(x.to("npu"), cos.to("npu"), sin.to("npu"))
    first, second = x.float().chunk(2, -1)
    expected = x.float() * cos.float() + torch.cat([-second, first], -1) * sin.float()
    assert largest_difference(found, expected) < 0.01
    queries, key = x[:, :, :-1].contiguous().to("npu"), x[:, :, -1:].contiguous().to("npu")
    turned = torch_npu.npu_apply_rotary_pos_emb(queries, key, cos.to("npu"), sin.to("npu"))
    assert largest_difference(torch.cat(turned, 2), expected) < 0.01
    assert torch.equal(turned[0], queries) and torch.equal(turned[1], key)  # in place
    gate, up = x.float().chunk(2, -1)
    assert largest_difference(torch_npu.npu_swiglu(x.to("npu")), F.silu(gate) * up) < 0.01
    with pytest.raises(Refused, match="contiguous"):
        torch_npu.npu_swiglu(x.to("npu").transpose(1, 2))


def test_a_quantized_product() -> None:
    x, weight = random(6, SIZE), random(32, SIZE, seed=1)
    scale = weight.float().abs().amax(1) / 127
    w8 = (weight.float() / scale[:, None]).round().to(torch.int8)
    x8, x_scale = torch_npu.npu_dynamic_quant(x.to("npu"))
    found = torch_npu.npu_quant_matmul(
        x8,
        w8.t().contiguous().to("npu"),
        scale.to("npu"),
        pertoken_scale=x_scale,
        output_dtype=torch.float16,
    )
    expected = x.float() @ weight.float().t()
    assert found.dtype == torch.float16
    assert largest_difference(found, expected) < 0.03 * float(expected.abs().max())
    only = torch_npu.npu_weight_quant_batchmatmul(
        x.to("npu"), w8.t().to("npu"), scale.half().to("npu")
    )
    assert largest_difference(only, expected) < 0.03 * float(expected.abs().max())


def test_an_unknown_argument_is_refused_by_the_schema() -> None:
    with pytest.raises((TypeError, RuntimeError), match="axis"):
        torch_npu.npu_swiglu(torch.ones(4, 8, device="npu"), axis=1)


def test_a_custom_op_without_a_kernel_says_so() -> None:
    with pytest.raises(Refused, match="no kernel"):
        torch_npu.npu_geglu(torch.ones(2, 8, dtype=torch.float16, device="npu"))


def routed(tokens: int = 5, experts: int = 4, chosen: int = 2) -> dict[str, Tensor]:
    """Rows in the order of their experts, with what `npu_moe_init_routing_v2` says of them."""
    x = random(tokens, 32).to("npu")
    index = torch.arange(tokens * chosen, dtype=torch.int32).view(tokens, chosen) * 3 % experts
    rows, order, groups, _ = torch_npu.npu_moe_init_routing_v2(
        x,
        index.to("npu"),
        expert_num=experts,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        quant_mode=-1,
    )
    return {"x": x, "index": index, "rows": rows, "order": order, "groups": groups}


def test_rows_of_experts_come_and_go_in_their_order() -> None:
    of = routed()
    assert of["groups"].tolist() == torch.bincount(of["index"].flatten(), minlength=4).tolist()
    back = of["rows"].cpu()[of["order"].cpu().long()].view(5, 2, 32)
    assert torch.equal(back, of["x"].cpu()[:, None].expand(5, 2, 32))


def multiply(rows: Tensor, groups: Tensor, **changes: object) -> Tensor:
    given: dict[str, object] = {"split_item": 2, "group_type": 0, "group_list_type": 1}
    weight = random(4, 32, 16).to("npu")
    found: Tensor = torch_npu.npu_grouped_matmul(
        [rows], [weight], group_list=groups, **{**given, **changes}
    )[0]
    return found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda of: multiply(of["rows"], of["groups"].int()), "group_list is int64"),
        (lambda of: multiply(of["rows"], of["groups"] + 1), "groups of 14 rows"),
        (lambda of: multiply(of["rows"][1:], of["groups"]), "groups of 10 rows, and 9"),
        (lambda of: multiply(of["rows"], of["groups"], group_list_type=0), "group_list"),
        (lambda of: multiply(of["rows"], of["groups"], split_item=0), "split_item 0"),
        (
            lambda of: multiply(of["rows"], of["groups"], bias=[of["rows"][:4, :16].float()]),
            "bias torch.float32",
        ),
        (
            lambda of: torch_npu.npu_moe_token_unpermute(
                of["rows"], of["order"], probs=torch.ones(5, 2, device="npu")
            ),
            "probs torch.float32",
        ),
        (
            lambda of: torch_npu.npu_moe_gating_top_k_softmax(of["x"], k=33),
            "33 of 32",
        ),
        (
            lambda of: torch_npu.npu_moe_init_routing_v2(
                of["x"], of["index"].to("npu"), expert_num=3, quant_mode=-1
            ),
            "an index of 3",
        ),
    ],
)
@torch.inference_mode()
def test_operators_for_experts_refuse_what_the_documents_refuse(
    change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    with pytest.raises(Refused, match=message):
        change(routed())
