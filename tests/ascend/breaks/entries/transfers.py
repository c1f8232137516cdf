"""The order of streams, and what the host waits for."""

from functools import partial

from tests.ascend.breaks.fault import DECODER, Break

_BLOCKS = ("decoder/test_ops.py::test_blocks_go_out_and_in_without_being_waited_for",)
_TRANSFERS = ("decoder/test_transfers.py",)
_STEADY = (
    "decoder/test_steady_step.py::test_a_step_takes_one_copy_each_way_and_one_wait[off-kinds0]",
)
_ops = partial(Break, file=f"{DECODER}/devices/npu/ops.py")
_device = partial(Break, file=f"{DECODER}/devices/npu/device.py")
_staging = partial(Break, file=f"{DECODER}/devices/base/staging.py")

BREAKS = [
    _ops(
        reason="blocks are swapped out before the steps that write them",
        old="        self._moves.wait_stream(compute)\n",
        new="",
        tests=_BLOCKS,
    ),
    _ops(
        reason="steps do not wait for blocks that are swapped in",
        old="        compute.wait_stream(self._moves)\n",
        new="",
        tests=_BLOCKS,
    ),
    _ops(
        reason="the host waits for blocks that are swapped",
        old="copy_(moved, non_blocking=True)",
        new="copy_(moved)",
        tests=_BLOCKS,
    ),
    Break(
        reason="blocks of the host are not pinned",
        file=f"{DECODER}/devices/npu/attention/cache.py",
        old="torch.zeros(shape, dtype=dtype, pin_memory=True)",
        new="torch.zeros(shape, dtype=dtype)",
        tests=_BLOCKS,
    ),
    _ops(
        reason="lengths of spans come from memory that is not pinned",
        old="torch.from_numpy(array).pin_memory()",
        new="torch.from_numpy(array)",
        tests=("decoder/test_ops.py::test_an_operation_waits_for_nothing",),
    ),
    _device(
        reason="embeddings are used before they are there",
        old="        self._copies.synchronize()\n",
        new="",
        tests=_TRANSFERS,
    ),
    _device(
        reason="memory of embeddings is given out while a step reads it",
        old="        here.record_stream(torch_npu.npu.default_stream())\n",
        new="",
        tests=_TRANSFERS,
    ),
    _device(
        reason="embeddings wait for steps",
        old="        self._copies.synchronize()\n",
        new="        self.synchronize()\n",
        tests=_TRANSFERS,
    ),
    _device(
        reason="transfers of steps are not pinned",
        old="torch.empty(size, dtype=torch.uint8, pin_memory=True)",
        new="torch.empty(size, dtype=torch.uint8)",
        tests=_TRANSFERS,
    ),
    _device(
        reason="an event is recorded before what it marks",
        old="        event.record()\n",
        new="",
        tests=_TRANSFERS,
    ),
    _staging(
        reason="a buffer is filled while its copy is under way",
        old="if buffer.event is not None and buffer.number > ended:",
        new="if False:",
        tests=_TRANSFERS,
    ),
    _staging(
        reason="a copy more than has been waited for counts as done",
        old="self._ended = max(self._ended, number)",
        new="self._ended = max(self._ended, number + 1)",
        tests=_TRANSFERS,
    ),
    _staging(
        reason="results are read before they have arrived",
        old="            event.synchronize()\n            self._ended",
        new="            self._ended",
        tests=_TRANSFERS,
    ),
    _staging(
        reason="there is one buffer in each direction",
        old="_DEPTH = 4",
        new="_DEPTH = 1",
        tests=_STEADY,
    ),
    Break(
        reason="the next step does not know the tokens of the last one",
        file=f"{DECODER}/worker/token_choice.py",
        old="            self.last_tokens.index_copy_(0, sent[1], valid)\n",
        new="            pass\n",
        tests=_STEADY,
    ),
    Break(
        reason="every id of a step launched ahead is that of slot 0",
        file=f"{DECODER}/worker/inputs/step_inputs.py",
        old="last_tokens.index_select(0, owners)",
        new="last_tokens.index_select(0, owners * 0)",
        tests=_STEADY,
    ),
]
