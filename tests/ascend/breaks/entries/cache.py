"""How keys and values are written to the cache, and its blocks are moved."""

from functools import partial

from tests.ascend.breaks.fault import DECODER, Break

_WRITTEN = ("decoder/test_ops.py::test_rows_are_turned_and_written",)
_FORMS = (
    "decoder/test_ops.py::test_keys_are_written_by_the_first_operator_that_is_right",
    "decoder/test_ops.py::test_without_nnal_keys_are_written_by_cann",
)
_MOVED = (
    "decoder/test_ops.py::test_blocks_go_out_and_in_without_being_waited_for",
    "decoder/test_ops.py::test_blocks_are_moved_wherever_they_go",
)
_ops = partial(Break, file=f"{DECODER}/devices/npu/ops.py")
_cache = partial(Break, file=f"{DECODER}/devices/npu/attention/cache.py")
_310p = partial(Break, file=f"{DECODER}/devices/npu/ops_310p.py")

BREAKS = [
    _ops(
        reason="slots are int64",
        old="""        slots = slots.to(torch.int32)
        meta = super()""",
        new="""        slots = slots.to(torch.int64)
        meta = super()""",
        tests=_WRITTEN,
    ),
    _ops(
        reason="slots that are scrubbed are int64",
        old="        slots = slots.to(torch.int32)\n        blank",
        new="        blank",
        tests=_MOVED,
    ),
    _ops(
        reason="values are scrubbed, keys are not",
        old="self.write(blank, blank, kv, slots)",
        new="self.write(torch.ones_like(blank), blank, kv, slots)",
        tests=_MOVED,
    ),
    _ops(
        reason="the layout of the cache is not named",
        old='kv.k, kv.v, slots, cache_mode="Norm")',
        new="kv.k, kv.v, slots)",
        tests=_FORMS,
    ),
    _ops(
        reason="keys are written where values are",
        old="torch_npu._npu_reshape_and_cache(k, v, kv.k, kv.v, slots)",
        new="torch_npu._npu_reshape_and_cache(v, k, kv.k, kv.v, slots)",
        tests=_FORMS,
    ),
    _ops(
        reason="plain torch writes the keys alone",
        old="        kv.v.flatten(0, 1).index_put_((slots,), v)\n",
        new="",
        tests=_FORMS,
    ),
    _ops(
        reason="the slowest way of writing is tried first",
        old='        if supports("_npu_reshape_and_cache") and not atb_fault():\n',
        new='        yield "index_put"\n        if supports("_npu_reshape_and_cache") and not atb_fault():\n',
        tests=_FORMS,
    ),
    _ops(
        reason="NNAL writes where it does not load",
        old='if supports("_npu_reshape_and_cache") and not atb_fault():',
        new='if supports("_npu_reshape_and_cache"):',
        tests=_FORMS,
    ),
    _ops(
        reason="a way of writing is taken without a trial",
        old="        return Trial(form, error, error <= most)\n",
        new="        return Trial(form, error, True)\n",
        tests=_FORMS,
    ),
    _cache(
        reason="blocks that part on one side are moved together",
        old="runs[-1][0] + runs[-1][2] == old and runs[-1][1] + runs[-1][2] == new:",
        new="runs[-1][0] + runs[-1][2] == old:",
        tests=_MOVED,
    ),
    _ops(
        reason="values are not swapped",
        old="for old, new in zip(olds, news, strict=True):",
        new="for old, new in zip(olds[:1], news[:1], strict=True):",
        tests=_MOVED,
    ),
    _cache(
        reason="a block comes in with its keys as values",
        old="self.v[block, ..., : self.v_size] = v.to(self.v.device)",
        new="self.v[block, ..., : self.v_size] = k.to(self.v.device)[..., : self.v_size]",
        tests=_MOVED,
    ),
    _ops(
        reason="heads are as wide in the cache as in the model",
        old="        width = padded_size(max(spec.k_size, spec.v_size))\n        shape",
        new="        width = max(spec.k_size, spec.v_size)\n        shape",
        tests=("decoder/test_ops.py::test_attention_over_pages",),
    ),
    Break(
        reason="rows of padding all write to one place",
        file=f"{DECODER}/worker/inputs/step_inputs.py",
        old="written[len(places) :] = np.arange(padded - len(places)) % size",
        new="written[len(places) :] = 0",
        tests=("decoder/test_graphs.py::test_tokens_are_those_without_graphs",),
    ),
    _310p(
        reason="a 310P's tiles of a block come in as they lie in rows",
        old="tiles = rows.reshape(parts, cache.shape[2], -1, TILE).permute(0, 2, 1, 3)",
        new="tiles = rows.reshape(parts, -1, cache.shape[2], TILE)",
        tests=("decoder/test_310p.py::test_every_operation_is_right",),
    ),
    _310p(
        reason="a 310P's blocks go out in other tiles",
        old="            .permute(0, 2, 1, 3)\n            .reshape(self.block_size, own.num_kv, -1)",
        new="            .reshape(self.block_size, own.num_kv, -1)",
        tests=("decoder/test_310p.py::test_every_operation_is_right",),
    ),
]
