"""Forms are tried in processes of their own: a kernel that fails, or ends its process, leaves the decoder as it is."""

import json
import os
from pathlib import Path

import pytest

from tests.ascend.environment import npu_environment
from tests.ascend.support import run_python

_ATTEND = """
import json, torch
from services.decoder.devices.npu.device import NpuDevice
from services.decoder.devices.npu.forms import Heads
from services.decoder.steps.attention_meta import KVSpec
from tests.ascend.decoder.test_ops import Pair
device = NpuDevice(torch.float16)
with torch.inference_mode():
    pair = Pair(device, KVSpec(2, 64, 64, torch.float16), 13)
    error = pair.attention(4, [1, 1, 7, 140], [1, 300, 260, 140])
print(json.dumps([device.ops.forms.form(Heads(4, 2, 64)) is None, error]))
"""


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_kernel_that_fails_costs_its_own_process_and_is_not_tried_again(tmp_path: Path) -> None:
    """One form fails, after which its process cannot try the next one, and that one ends its process."""
    planted = {
        "FAKE_NPU_FAULTING": "npu_fused_infer_attention_score:TND",
        "FAKE_NPU_CRASHING": "npu_fused_infer_attention_score:BSND",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    reports = tmp_path / "reports"
    reports.mkdir()
    environment = npu_environment(reports=reports, base={**os.environ, **planted})
    processes = []
    for _ in range(2):
        said = run_python(_ATTEND, environment, timeout=300).splitlines()[-1]
        by_reference, error = json.loads(said)
        assert by_reference and error < 0.01
        processes.append(len(list(reports.iterdir())))
    # The program and a trial of each form, and when it starts again itself alone.
    assert processes == [3, 4]
