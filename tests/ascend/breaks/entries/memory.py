"""What a decoder takes for its cache, and what it leaves."""

from functools import partial

from tests.ascend.breaks.fault import DECODER, Break

_BUDGET = ("decoder/test_budget.py",)
_WORKSPACES = ("decoder/test_workspaces.py",)
_device = partial(Break, file=f"{DECODER}/devices/npu/device.py", tests=_BUDGET)
_OUTSIDE = "outside = self._free_at_start - memory.free - int(torch_npu.npu.memory_reserved())"
_RESERVED = "reserved = max(_LEAST_RESERVED_BYTES, int(memory.total * _RESERVED_SHARE))"
_ALLOWED = "int(memory.total * (share or _SHARE) / sharers)"

BREAKS = [
    _device(
        reason="what CANN has taken does not count",
        old=_OUTSIDE,
        new="outside = 0",
    ),
    _device(
        reason="memory that torch keeps counts as CANN's",
        old=_OUTSIDE,
        new="outside = self._free_at_start - memory.free",
    ),
    _device(
        reason="what the profile has freed stays with the process",
        old="        torch_npu.npu.empty_cache()  # what the profile has freed is for others on the device\n",
        new="",
    ),
    Break(
        reason="workspaces of operators are forgotten, which go where caches are emptied",
        file=f"{DECODER}/devices/npu/device.py",
        old="        memory = self.memory()\n        outside",
        new="        torch_npu.npu.empty_cache()\n        memory = self.memory()\n        outside",
        tests=_WORKSPACES,
    ),
    Break(
        reason="the largest step chooses no tokens",
        file=f"{DECODER}/loading/profile_run.py",
        old="draws=device.asynchronous",
        new="draws=False",
        tests=_WORKSPACES,
    ),
    _device(
        reason="nothing is in reserve unless it is asked for",
        old=_RESERVED,
        new="reserved = 0",
    ),
    _device(
        reason="the reserve is the same on large devices",
        old=_RESERVED,
        new="reserved = _LEAST_RESERVED_BYTES",
    ),
    _device(
        reason="the reserve of small devices is a share of them",
        old=_RESERVED,
        new="reserved = int(memory.total * _RESERVED_SHARE)",
    ),
    _device(
        reason="a reserve that is asked for is not kept",
        old="        if reserved is None:\n            reserved = max",
        new="        if True:\n            reserved = max",
    ),
    _device(
        reason="a 310P's cache takes all that is left",
        old="return replace(budget, most=budget.nbytes // 2) if is_310p() else budget",
        new="return budget",
    ),
    _device(
        reason="decoders on one device take as much as one alone",
        old=_ALLOWED,
        new="int(memory.total * (share or _SHARE))",
    ),
    _device(
        reason="the share that is asked for is not looked at",
        old=_ALLOWED,
        new="int(memory.total * _SHARE / sharers)",
    ),
    _device(
        reason="weights do not count",
        old="int(torch_npu.npu.memory_allocated())),\n",
        new="0),\n",
    ),
    _device(
        reason="the largest step does not count",
        old='max-num-seqs)", step_bytes),\n',
        new='max-num-seqs)", 0),\n',
    ),
    _device(
        reason="the highest use of memory is that since the start",
        old="        torch_npu.npu.reset_peak_memory_stats()\n",
        new="",
    ),
    _device(
        reason="what a step takes is what it leaves behind",
        old="return int(torch_npu.npu.max_memory_allocated()) - before",
        new="return int(torch_npu.npu.memory_allocated()) - before",
    ),
    _device(
        reason="memory that others hold is not seen",
        old="        if memory.free < wanted:\n",
        new="        if False:\n",
    ),
    _device(
        reason="decoders on one device each ask for all of it",
        old="wanted = self._allowed(memory, share, sharers)",
        new="wanted = self._allowed(memory, share, 1)",
    ),
    _device(
        reason="the share that would fit is rounded up",
        old="return math.floor(100 * min",
        new="return math.ceil(100 * min",
    ),
    _device(
        reason="decoders on one host pin as much as one alone",
        old="int(host_memory.available_bytes() * _SWAP_SHARE / sharers)",
        new="int(host_memory.available_bytes() * _SWAP_SHARE)",
    ),
    _device(
        reason="a 310P swaps",
        old="        if is_310p():\n            return 0\n",
        new="",
    ),
    Break(
        reason="blocks are counted without the zeros of their heads",
        file=f"{DECODER}/devices/npu/ops.py",
        old="        width = padded_size(max(spec.k_size, spec.v_size))\n        return 2 *",
        new="        width = max(spec.k_size, spec.v_size)\n        return 2 *",
        tests=_BUDGET,
    ),
    Break(
        reason="a term of memory that is taken is not subtracted",
        file=f"{DECODER}/devices/base/cache_budget.py",
        old="sum(size for _, size in self.taken)",
        new="sum(size for _, size in self.taken[1:])",
        tests=_BUDGET,
    ),
    Break(
        reason="a cache grows beyond what is left",
        file=f"{DECODER}/loading/memory.py",
        old="return asked or min(budget, most_useful)",
        new="return asked or most_useful",
        tests=(
            "decoder/test_memory.py::test_the_cache_takes_what_the_rest_leaves[910B4-268435456-off]",
        ),
    ),
]
