"""Towers of the vision encoder."""

from functools import partial

from tests.ascend.breaks.fault import ENCODER, Break

_ROWS = (
    "vision_encoder/test_towers.py::test_rows_are_those_of_the_cpu[wemm-torch.float16]",
    "vision_encoder/test_towers.py::test_rows_are_those_of_the_cpu[qwen2_5_vl-torch.float16]",
)
_NORMS = (
    "vision_encoder/test_towers.py::test_rows_are_those_of_the_cpu[internvl_chat, head norms-torch.float16]",
)
_310P = ("vision_encoder/test_towers.py::test_towers_on_310p",)
_CHECK = ("vision_encoder/test_check.py",)
_ops = partial(Break, file=f"{ENCODER}/devices/npu/ops.py")
_310p = partial(Break, file=f"{ENCODER}/devices/npu/ops_310p.py")

BREAKS = [
    _ops(
        reason="a tower's scores are not scaled",
        old="            scale=size**-0.5,\n",
        new="",
        tests=_ROWS,
    ),
    _ops(
        reason="a tower's scores are scaled by the size of heads with their zeros",
        old="            scale=size**-0.5,\n",
        new="            scale=q.shape[-1] ** -0.5,\n",
        tests=_ROWS,
    ),
    _ops(
        reason="pictures see each other",
        old="        ends = list(accumulate(lengths))\n",
        new="        ends = [sum(lengths)]\n",
        tests=_ROWS,
    ),
    _ops(
        reason="lengths of segments are not cumulative",
        old="        ends = list(accumulate(lengths))\n",
        new="        ends = list(lengths)\n",
        tests=_ROWS,
    ),
    _ops(
        reason="a tower's attention is causal",
        old="            sparse_mode=0,\n",
        new="            sparse_mode=3,\n",
        tests=_ROWS,
    ),
    _ops(
        reason="a tower's fused attention is never used",
        old="                    return padded\n",
        new="                    return None\n",
        tests=_ROWS,
    ),
    _ops(
        reason="faults of a tower's attention are not looked for",
        old="max()) < _TOLERANCE:",
        new="max()) < 1e9:",
        tests=_CHECK,
    ),
    _ops(
        reason="zeros of a head stand behind both halves",
        old="return nn.functional.pad(halves, (0, (padded - size) // 2)).flatten(-2)",
        new="return nn.functional.pad(x, (0, padded - size))",
        tests=_ROWS,
    ),
    _ops(
        reason="zeros of a head count in its norm",
        old="norm.eps * share)",
        new="norm.eps)",
        tests=_NORMS,
    ),
    _ops(
        reason="weights of a head's norm do not make up for zeros",
        old="(wide * share**0.5)",
        new="wide",
        tests=_NORMS,
    ),
    _ops(
        reason="the sum of a tower's norm is what stands between",
        old="        normed, _, total = torch_npu.npu_add_rms_norm",
        new="        normed, total, _ = torch_npu.npu_add_rms_norm",
        tests=_ROWS,
    ),
    _ops(
        reason="pixels are not shifted by their mean",
        old="factor, offset = scaling.factor / deviation, -mean / deviation",
        new="factor, offset = scaling.factor / deviation, 0 * mean",
        tests=_ROWS,
    ),
    Break(
        reason="embeddings are read before they have arrived",
        file=f"{ENCODER}/devices/base/accelerator.py",
        old="        here.copy_(together, non_blocking=True)\n        self.synchronize()\n",
        new="        here.copy_(together, non_blocking=True)\n",
        tests=_ROWS,
    ),
    Break(
        reason="pixels come from memory that is not pinned",
        file=f"{ENCODER}/devices/base/accelerator.py",
        old="staged = torch.empty(size, dtype=torch.uint8, pin_memory=True)",
        new="staged = torch.empty(size, dtype=torch.uint8)",
        tests=_ROWS,
    ),
    _310p(
        reason="a 310P's pictures see each other",
        old="_on_host(tuple(lengths))",
        new="_on_host((sum(lengths),))",
        tests=_310P,
    ),
    _310p(
        reason="a 310P's scores of a tower are not scaled",
        old="size**-0.5, q.shape[1]",
        new="1.0, q.shape[1]",
        tests=_310P,
    ),
]
