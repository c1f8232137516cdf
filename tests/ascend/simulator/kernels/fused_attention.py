"""`npu_fused_infer_attention_score` (FIA) and its second version, in the layouts TND, BSND and BSH."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.ascend.simulator.dispatch import kernel
from tests.ascend.simulator.errors import require
from tests.ascend.simulator.kernels.antiquant import Antiquant
from tests.ascend.simulator.kernels.attention import attend, attend_last, band, gather
from tests.ascend.simulator.kernels.layer import require_contiguous

TND_SIZES = [64, 128, 192, 256]
_LARGEST_SIZE, _MOST_HEADS, _MOST_GROUPS, _MOST_SEQUENCES = 512, 256, 64, 4096
_MASK = (2048, 2048)
_UNLIMITED = 2147483647
_LONGEST_MASKED_ROW = 512


@dataclass(frozen=True)
class FusedAttention:
    """One call, under the names of the first version."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    query_lengths: Sequence[int] | None
    kv_lengths: Sequence[int] | None
    table: Tensor | None
    heads: int
    kv_heads: int
    scale: float
    before: int
    after: int
    layout: str
    mode: int
    block_size: int
    sinks: Tensor | None = None
    codes: Antiquant | None = None

    def check(self) -> None:
        """Raises Refused where a documented limit is not kept."""
        require_contiguous(
            "FIA",
            query=self.query,
            mask=self.mask,
            table=self.table,
            key=self.key,
            value=self.value,
        )
        kind = self.query.dtype
        require(kind in (torch.float16, torch.bfloat16), f"FIA: queries of {kind}")
        of_keys = kind if self.codes is None else torch.int8
        require(
            self.key.dtype == self.value.dtype == of_keys,
            f"FIA: keys of {self.key.dtype} for {kind}",
        )
        if self.codes is not None:
            self._check_codes(self.codes)
        groups = self.heads // self.kv_heads
        fits = (
            self.heads % self.kv_heads == 0 and self.heads <= _MOST_HEADS and groups <= _MOST_GROUPS
        )
        require(fits, f"FIA: {self.heads} heads over {self.kv_heads}")
        known = ("TND", "BSND", "BSH", "BNSD")
        require(self.layout in known, f"FIA: layout {self.layout} is not simulated")
        self._check_sparse_mode()
        if self.sinks is not None:
            require(list(self.sinks.shape) == [self.heads], f"FIA: sinks {list(self.sinks.shape)}")
            require(
                self.sinks.dtype == torch.bfloat16,
                f"FIA: sinks of {self.sinks.dtype}, must be bfloat16",
            )
            require(self.layout == "TND", f"FIA: sinks in layout {self.layout}")

    def _check_codes(self, codes: Antiquant) -> None:
        """By op-plugin's tables for queries of a single token and for blocks: scales of mode 5 lie in blocks."""
        require(self.layout != "TND", "FIA: keys of int8 in layout TND")
        require(self._single_queries(), "FIA: keys of int8 in blocks take queries of one token")
        require(self.table is not None, "FIA: keys of int8 without blocks are not simulated")
        require(self.sinks is None, "FIA: sinks with keys of int8")
        require(self.block_size % 32 == 0, f"FIA: blocks of {self.block_size} keys of int8")
        width = self.key.shape[-1] // self.kv_heads
        require(width % 32 == 0, f"FIA: heads of {width} elements of int8")
        codes.check([len(self.key), self.kv_heads, self.block_size])

    def _single_queries(self) -> bool:
        return self.query.shape[2 if self.layout == "BNSD" else 1] == 1

    def _check_sparse_mode(self) -> None:
        require(self.mode in (0, 3, 4), f"FIA: sparse_mode {self.mode} is not simulated")
        mask = self.mask
        if mask is None:
            require(self.mode == 0, f"FIA: sparse_mode {self.mode} takes a mask")
            return
        require(mask.dtype in (torch.bool, torch.int8, torch.uint8), f"FIA: a mask of {mask.dtype}")
        if self.mode == 0:
            ignored = mask.shape[-2] == 1 and mask.shape[-1] > _LONGEST_MASKED_ROW
            require(not ignored, "FIA: a mask of one row is ignored past key 512")
            return
        require(
            tuple(mask.shape[-2:]) == _MASK,
            f"FIA: a mask {list(mask.shape)} instead of 2048 x 2048",
        )
        corner = mask.reshape(-1, *_MASK)[0]
        upper = bool(corner[0, 1]) and not bool(corner[0, 0]) and not bool(corner[1, 0])
        require(
            upper, "FIA: 1 hides a key, so the mask must be upper triangular without its diagonal"
        )

    def run(self) -> Tensor:
        """The output, in the layout of the queries."""
        self.check()
        return self._packed() if self.layout == "TND" else self._batched()

    def _packed(self) -> Tensor:
        tokens, heads, size = self.query.shape
        ends = self.query_lengths
        require(
            heads == self.heads, f"FIA: {heads} heads in the queries, num_heads is {self.heads}"
        )
        require(size in TND_SIZES, f"FIA: TND head size {size} is not one of {TND_SIZES} (561002)")
        require(ends is not None and len(ends) > 0, "FIA: TND takes actual_seq_lengths")
        assert ends is not None
        require(
            ends[-1] == tokens,
            f"FIA: actual_seq_lengths end at {ends[-1]}, there are {tokens} tokens (561002)",
        )
        starts = [0, *ends[:-1]]
        require(
            all(a <= b for a, b in zip(starts, ends, strict=True)),
            "FIA: actual_seq_lengths must be cumulative",
        )
        require(len(ends) <= _MOST_SEQUENCES, f"FIA: {len(ends)} sequences")
        lengths = self._kv_lengths(len(ends))
        if self.table is not None:
            self._check_table(len(ends), max(b - a for a, b in zip(starts, ends, strict=True)))
        out = torch.zeros(tokens, heads, self._value_size(size), dtype=self.query.dtype)
        single = [
            i for i in range(len(ends)) if ends[i] - starts[i] == 1 and self.table is not None
        ]
        if single:
            at = torch.tensor([starts[i] for i in single])
            out[at] = self._single(self.query[at], single, [lengths[i] for i in single])
        for row in sorted(set(range(len(ends))) - set(single)):
            if ends[row] > starts[row]:
                part = slice(starts[row], ends[row])
                out[part] = self._row(self.query[part], row, lengths[row], self.mode)
        return out

    def _batched(self) -> Tensor:
        # Queries of one token lie alike with heads before tokens and behind them.
        is_turned = self.layout == "BNSD"
        require(not is_turned or self._single_queries(), "FIA: BNSD of prompts is not simulated")
        batch, length = self.query.shape[0], 1 if is_turned else self.query.shape[1]
        queries = self.query.reshape(batch, length, self.heads, -1)
        size = queries.shape[-1]
        require(size % 16 == 0 and size <= _LARGEST_SIZE, f"FIA: head size {size}")
        lengths = self._kv_lengths(batch)
        if self.table is not None:
            self._check_table(batch, length)
        if length == 1 and self.table is not None:
            # One query sees all keys: sparse_mode and the lengths of queries are ignored.
            out = self._single(queries[:, 0], range(batch), lengths, windowed=False)[:, None]
            return out.reshape(self.query.shape)
        mode = self.mode if length > 1 else 0
        counts = (
            [length] * batch if self.query_lengths is None or length == 1 else self.query_lengths
        )
        out = torch.zeros_like(queries)
        for row, number in enumerate(counts):
            out[row, :number] = self._row(queries[row, :number], row, lengths[row], mode)
        return out.reshape(self.query.shape)

    def _kv_lengths(self, batch: int) -> list[int]:
        """Of each sequence; for packed keys the call gives their ends instead."""
        if self.kv_lengths is None:
            require(
                self.layout != "TND" and self.table is None, "FIA: actual_seq_lengths_kv is missing"
            )
            return [self.key.shape[1]] * batch
        given = list(self.kv_lengths)
        require(
            len(given) == batch, f"FIA: {len(given)} lengths of keys for {batch} sequences (561002)"
        )
        if self.table is None and self.layout == "TND":
            require(
                given[-1] == len(self.key),
                f"FIA: actual_seq_lengths_kv end at {given[-1]}, keys {len(self.key)}",
            )
            given = [b - a for a, b in pairwise([0, *given])]
        require(all(n > 0 for n in given), f"FIA: lengths of keys {given}")
        return given

    def _check_table(self, batch: int, longest: int) -> None:
        table, size = self.table, self.block_size
        assert table is not None
        require(table.dtype == torch.int32, f"FIA: block_table of {table.dtype}")
        require(
            table.dim() == 2 and len(table) == batch,
            f"FIA: block_table {list(table.shape)} for {batch} (561002)",
        )
        if longest > 1 and self.layout != "TND":
            require(size % 128 == 0 and 128 <= size <= 512, f"FIA: block size {size}")
        else:
            most = 1024 if self.layout == "TND" else 512
            require(size > 0 and size % 16 == 0 and size <= most, f"FIA: block size {size}")
        head = self.query.shape[-1] // (self.heads if self.layout == "BSH" else 1)
        wanted = [size, self.kv_heads * head]
        require(
            list(self.key.shape[1:]) == wanted,
            f"FIA: keys {list(self.key.shape)}, wanted [blocks, {wanted}]",
        )

    def _value_size(self, size: int) -> int:
        return size if self.table is not None else self.value.shape[-1]

    def _row(self, query: Tensor, row: int, keys: int, mode: int) -> Tensor:
        """[S, Hq, Dv] of one sequence."""
        queries = len(query)
        key, value = (self._keys(cache, row, keys) for cache in (self.key, self.value))
        return attend(
            query[None], key, value, self._hidden(row, queries, keys, mode), self.scale, self.sinks
        )[0]

    def _keys(self, cache: Tensor, row: int, length: int) -> Tensor:
        if self.table is not None:
            return gather(cache, self.table[row : row + 1], length, self.kv_heads)
        if self.layout == "TND":
            assert self.kv_lengths is not None
            end = self.kv_lengths[row]
            return cache[end - length : end][None]
        return cache[row, :length].reshape(1, length, self.kv_heads, -1)

    def _hidden(self, row: int, queries: int, keys: int, mode: int) -> Tensor | None:
        if mode in (3, 4):
            require(
                queries <= keys, f"FIA: {queries} queries and {keys} keys: some queries see nothing"
            )
            return band(queries, keys, *self._window(mode))
        if self.mask is None:
            return None
        masks = self.mask.bool().reshape(-1, *self.mask.shape[-2:])
        require(
            masks.shape[1] >= queries and masks.shape[2] >= keys,
            f"FIA: mask {list(self.mask.shape)}",
        )
        return masks[min(row, len(masks) - 1)][None, :queries, :keys]

    def _window(self, mode: int) -> tuple[int, int]:
        return (self.before, self.after) if mode == 4 else (_UNLIMITED, 0)

    def _single(
        self, query: Tensor, rows: Sequence[int], lengths: Sequence[int], windowed: bool = True
    ) -> Tensor:
        """[n, Hq, D] of sequences with one query each, all at once."""
        assert self.table is not None
        before = self.before if windowed and self.mode == 4 else None
        caches = self.key, self.value
        if self.codes is not None:
            caches = self.codes.numbers(self.key, self.value)
        table = self.table[torch.tensor(rows)]
        return attend_last(
            query, caches, table, lengths, self.kv_heads, self.scale, self.sinks, before
        )


def _antiquant(options: dict[str, Any]) -> Antiquant | None:
    """Takes what is said of codes out of the options of the first version."""
    parts = {part: options.pop(f"{part}_antiquant_scale", None) for part in ("key", "value")}
    modes = [options.pop(f"{part}_antiquant_mode", 0) for part in ("key", "value")]
    if all(scale is None for scale in parts.values()):
        require(modes == [0, 0], f"FIA: antiquant modes {modes} without scales")
        return None
    return Antiquant(parts["key"], parts["value"], modes[0], modes[1])


def _refuse_other(name: str, options: dict[str, Any]) -> None:
    for option, value in options.items():
        unused = value is None or (isinstance(value, (int, bool)) and value == 0)
        require(unused, f"{name}: {option} is not simulated")


@kernel("npu", "npu_fused_infer_attention_score")
def fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    block_table: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = _UNLIMITED,
    next_tokens: int = _UNLIMITED,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    block_size: int = 0,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    codes = _antiquant(options)
    _refuse_other("npu_fused_infer_attention_score", options)
    call = FusedAttention(
        query,
        key,
        value,
        atten_mask,
        actual_seq_lengths,
        actual_seq_lengths_kv,
        block_table,
        num_heads,
        num_key_value_heads or num_heads,
        scale,
        pre_tokens,
        next_tokens,
        input_layout,
        sparse_mode,
        block_size,
        codes=codes,
    )
    return call.run(), torch.zeros(1)


@kernel("npu", "npu_fused_infer_attention_score_v2")
def fused_infer_attention_score_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    block_table: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    pre_tokens: int = _UNLIMITED,
    next_tokens: int = _UNLIMITED,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
    inner_precise: int = 0,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    _refuse_other("npu_fused_infer_attention_score_v2", options)
    call = FusedAttention(
        query,
        key,
        value,
        atten_mask,
        actual_seq_qlen,
        actual_seq_kvlen,
        block_table,
        num_query_heads,
        num_key_value_heads or num_query_heads,
        softmax_scale,
        pre_tokens,
        next_tokens,
        input_layout,
        sparse_mode,
        block_size,
        learnable_sink,
    )
    return call.run(), torch.zeros(1)
