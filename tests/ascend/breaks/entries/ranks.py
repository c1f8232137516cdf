"""What ranks of one decoder compute together."""

from functools import partial

from tests.ascend.breaks.fault import DECODER, Break

_RANKS = ("decoder/test_ranks.py::test_two_ranks[qwen2-float16-0.05-off]",)
_group = partial(Break, file=f"{DECODER}/ranks/rank_group.py", tests=_RANKS)
_share = partial(Break, file=f"{DECODER}/ranks/share.py", tests=_RANKS)

BREAKS = [
    _group(
        reason="ranks do not add up what they have computed",
        old="            _complete(lambda: dist.all_reduce(x))\n",
        new="            pass\n",
    ),
    _group(
        reason="the largest logit is the first rank's",
        old="        best = each.amax(0)\n",
        new="        best = each[0]\n",
    ),
    _group(
        reason="ids of every rank begin at 0",
        old="own = torch.stack((ids.to(torch.int32) + first,",
        new="own = torch.stack((ids.to(torch.int32),",
    ),
    _share(
        reason="every rank has the first heads",
        old="query = self.rank * own.num_q",
        new="query = 0",
    ),
    _share(
        reason="every rank has the keys of the first one",
        old="key = self.rank * config.num_kv_heads // self.size",
        new="key = 0",
    ),
    _share(
        reason="what gates a rank's rows is the first rank's",
        old="return self._cut(gate_up, [(first, last), (half + first, half + last)])",
        new="return self._cut(gate_up, [(0, last - first), (half + first, half + last)])",
    ),
]
