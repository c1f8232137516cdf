"""How attention is called: masks, lengths, windows, scales."""

from functools import partial

from tests.ascend.breaks.fault import DECODER, Break

_PAGES = ("decoder/test_ops.py::test_attention_over_pages",)
_WINDOW = ("decoder/test_ops.py::test_heads_of_256_by_newer_and_older_releases",)
_SPANS = ("decoder/test_ops.py::test_spans_that_see_each_other_whole",)
_SINKS = ("decoder/test_check.py::test_every_operation_is_right",)
_TOLD = ("decoder/test_check.py::test_a_kernel_with_a_fault_is_told",)
_310P = (
    "decoder/test_310p.py::test_every_operation_is_right",
    "decoder/test_310p.py::test_attention_is_the_references_by_whatever_kernel",
)
_fused = partial(Break, file=f"{DECODER}/devices/npu/attention/fused_attention.py")
_call = partial(Break, file=f"{DECODER}/devices/npu/attention_call.py")
_ops = partial(Break, file=f"{DECODER}/devices/npu/ops.py")
_tiled = partial(Break, file=f"{DECODER}/devices/npu/attention/tiled_attention.py")
_telling = partial(Break, file=f"{DECODER}/devices/npu/trials/telling_batch.py")
_V1 = """            num_heads=q.shape[-2],
            num_key_value_heads=num_kv,
            scale=options.scale,"""

BREAKS = [
    _fused(
        reason="a query sees the key behind it",
        old="dtype=torch.int8).triu(1)",
        new="dtype=torch.int8).triu(2)",
        tests=_PAGES,
    ),
    _fused(
        reason="a query does not see itself",
        old="dtype=torch.int8).triu(1)",
        new="dtype=torch.int8).triu(0)",
        tests=_PAGES,
    ),
    _fused(
        reason="the mask is that of the keys before a query",
        old="dtype=torch.int8).triu(1)",
        new="dtype=torch.int8).tril(-1)",
        tests=_PAGES,
    ),
    _fused(
        reason="causal attention counts from the first key",
        old="_UNMASKED, _CAUSAL, _BAND = 0, 3, 4",
        new="_UNMASKED, _CAUSAL, _BAND = 0, 2, 4",
        tests=_PAGES,
    ),
    _fused(
        reason="scores are not scaled",
        old=_V1,
        new=_V1.replace("options.scale", "1.0"),
        tests=_PAGES,
    ),
    _fused(
        reason="all queries have keys of their own",
        old=_V1,
        new=_V1.replace("heads=num_kv", "heads=q.shape[-2]"),
        tests=_PAGES,
    ),
    _fused(
        reason="a window ends behind the query",
        old="ahead = 0 if options.mode == _BAND else _NO_LIMIT",
        new="ahead = _NO_LIMIT",
        tests=_WINDOW,
    ),
    _fused(
        reason="a window is one key wider",
        old="reach = window + form.window_offset if",
        new="reach = window + form.window_offset + 1 if",
        tests=_WINDOW,
    ),
    _fused(
        reason="a window counts in one way alone",
        old="offsets = (-1, 0) if heads.window else (-1,)",
        new="offsets = (-1,)",
        tests=("decoder/test_ops.py::test_a_kernel_may_count_windows_otherwise",),
    ),
    _fused(
        reason="sinks are left out",
        old="self._mask if call.causal else None, sinks)",
        new="self._mask if call.causal else None, None)",
        tests=_SINKS,
    ),
    _fused(
        reason="a batch of sequences has the lengths of the first ones alone",
        old="None, call.kv_lens[:ones], call.table",
        new="None, [call.kv_lens[0]] * ones, call.table",
        tests=_WINDOW,
    ),
    _fused(
        reason="a sequence has the blocks of the first one",
        old="length, call.kv_lens[one], call.table[one],",
        new="length, call.kv_lens[one], call.table[:1],",
        tests=_WINDOW,
    ),
    _call(
        reason="lengths of queries are not cumulative",
        old="[AttentionCall(meta.cu_q[1:], meta.kv_lens",
        new="[AttentionCall([1] * meta.n, meta.kv_lens",
        tests=_PAGES,
    ),
    _call(
        reason="lengths of keys are cumulative",
        old="[AttentionCall(meta.cu_q[1:], meta.kv_lens",
        new="[AttentionCall(meta.cu_q[1:], list(accumulate(meta.kv_lens))",
        tests=_PAGES,
    ),
    _call(
        reason="text before a span sees the span",
        old="between.append(_Piece(row, token + at - begin, low - at, low))",
        new="between.append(_Piece(row, token + at - begin, low - at, high))",
        tests=_SPANS,
    ),
    _call(
        reason="a span is causal",
        old="                causal=causal,\n",
        new="",
        tests=_SPANS,
    ),
    _call(
        reason="spans have the blocks of the first row",
        old="rows = send(np.asarray([piece.row for piece in pieces], np.int64))",
        new="rows = send(np.asarray([0 for piece in pieces], np.int64))",
        tests=_SPANS,
    ),
    _ops(
        reason="spans under a window lose the window",
        old="cut = window is not None and bool(meta.bidirectional)",
        new="cut = False",
        tests=_SPANS,
    ),
    _ops(
        reason="a soft cap is left out",
        old="None if chunk or softcap is not None or cut else",
        new="None if chunk or cut else",
        tests=("decoder/test_ops.py::test_attention_with_what_some_models_ask_for",),
    ),
    _ops(
        reason="sines have the sign that plain torch wants",
        old="plain = torch.cat([-sin[..., :half], sin[..., half:]], -1)",
        new="plain = sin",
        tests=("decoder/test_ops.py::test_rows_are_turned_and_written",),
    ),
    _ops(
        reason="the last of the largest is found",
        old="return (logits == values[:, None]).float().argmax(-1), values",
        new="return logits.shape[1] - 1 - (logits == values[:, None]).float().flip(-1).argmax(-1), values",
        tests=("decoder/test_ops.py::test_the_first_of_the_largest_is_found",),
    ),
    _ops(
        reason="the norm's sum is what stands between",
        old="normed, _, total = torch_npu.npu_add_rms_norm",
        new="normed, total, _ = torch_npu.npu_add_rms_norm",
        tests=("decoder/test_ops.py::test_small_operations",),
    ),
    _telling(
        reason="every form agrees",
        old='return float(torch.nan_to_num(difference, nan=float("inf")))',
        new="return 0.0",
        tests=_TOLD,
    ),
    _tiled(
        reason="a 310P's query does not see itself",
        old="hidden = places > last[None, :, None]",
        new="hidden = places >= last[None, :, None]",
        tests=_310P,
    ),
    _tiled(
        reason="a 310P's query sees what is behind it",
        old="hidden = places > last[None, :, None]",
        new="hidden = places > last[None, :, None] + 1",
        tests=_310P,
    ),
    _tiled(
        reason="positions of a 310P's queries begin at 0",
        old="np.arange(counts.sum()) + np.repeat(ends - counts - before, counts)",
        new="np.arange(counts.sum()) - np.repeat(before, counts)",
        tests=_310P,
    ),
    _tiled(
        reason="a 310P's lengths are always on the device",
        old="keys = call.keys if form == FORMS[0] else call.keys_on_host",
        new="keys = call.keys",
        tests=_310P,
    ),
    _tiled(
        reason="a 310P's mask is in rows",
        old="tiled: Tensor = torch_npu.npu_format_cast(mask[None], NZ)\n    return tiled",
        new="return mask[None]",
        tests=_310P,
    ),
]
