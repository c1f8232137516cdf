"""Quantized weights are packed on an NPU as their numbers are."""

import torch

from services.decoder.devices.npu.device import NpuDevice
from tests.ascend.environment import npu_environment
from tests.ascend.support import run_python
from tests.support.decoder.packs import require_equal_packs, require_packs_ask


def test_each_pack_asks_and_packs_what_the_codes_mean() -> None:
    ops = NpuDevice(torch.float16).ops
    require_packs_ask(ops)
    require_equal_packs(ops)


def test_a_310p_packs_them_in_tiles() -> None:
    program = "; ".join(
        (
            "import torch",
            "from services.decoder.devices.npu.device import NpuDevice",
            "from tests.support.decoder.packs import require_equal_packs, require_packs_ask",
            "ops = NpuDevice(torch.float16).ops",
            "assert ops.name == 'npu-310p'",
            "require_packs_ask(ops)",
            "require_equal_packs(ops)",
        )
    )
    run_python(program, npu_environment("310P3"))
