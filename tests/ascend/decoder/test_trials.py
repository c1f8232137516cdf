"""Forms are tried in processes of their own: a kernel that fails, or ends its process, leaves the decoder as it is."""

import json
import os
from pathlib import Path

from tests.ascend.environment import npu_environment
from tests.ascend.support import run_python

_ATTEND = """
import json, torch
from services.decoder.devices.npu.device import NpuDevice
from services.decoder.devices.npu.forms import Heads
from services.decoder.steps.attention_meta import KVSpec
from tests.ascend.decoder.test_ops import Pair
from tests.ascend.support import random
device = NpuDevice(torch.float16)
with torch.inference_mode():
    pair = Pair(device, KVSpec(2, 64, 64, torch.float16), 13)
    rows = [1, 1, 7, 140], [1, 300, 260, 140]
    errors = [pair.attention(4, *rows), pair.attention(4, *rows, sinks=random(4, seed=9))]
forms = [device.ops.forms.form(Heads(4, 2, 64, sinks=sinks)) for sinks in (False, True)]
print(json.dumps([[form and form.name for form in forms], errors]))
"""


def test_a_kernel_that_fails_costs_its_own_process_and_is_not_tried_again(tmp_path: Path) -> None:
    """Of two heads one has a form that fails, and the other one that ends its process and another that is refused."""
    planted = {
        "FAKE_NPU_FAULTING": "npu_fused_infer_attention_score:TND",
        "FAKE_NPU_CRASHING": "npu_fused_infer_attention_score_v2:TND",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    reports = tmp_path / "reports"
    reports.mkdir()
    environment = npu_environment(reports=reports, base={**os.environ, **planted})
    processes = []
    for _ in range(2):
        forms, errors = json.loads(run_python(_ATTEND, environment).splitlines()[-1])
        assert forms == ["BSND", None]  # None: the reference
        assert max(errors) < 0.01
        processes.append(len(list(reports.iterdir())))
    # The program, two trials for each heads, and when it starts again itself alone.
    assert processes == [5, 6]
