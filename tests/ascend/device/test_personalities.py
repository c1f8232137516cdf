"""What the devices differ in: memory, bfloat16, kernels that 310P lacks, and its weights and caches in NZ."""

import json
import os
from pathlib import Path

import pytest
import torch_npu

from tests.ascend.environment import npu_environment
from tests.ascend.programs.personality import report
from tests.ascend.simulator.counters import counts_of
from tests.ascend.support import run_python


def test_910b_takes_all_and_keeps_rows() -> None:
    torch_npu.npu.config.allow_internal_format = False  # of a process that tiled weights before
    found = report()
    assert found["device"] == "Ascend910B4"
    assert found["memory"] == int(os.environ["FAKE_NPU_BYTES"])
    assert found["product"] == 4 * 32 * 64
    assert found["format"] == "ND"
    assert all(found["takes"].values())


def test_310p_lacks_kernels_and_has_weights_and_caches_in_nz(tmp_path: Path) -> None:
    program = (
        "import runpy; runpy.run_module('tests.ascend.programs.personality', run_name='__main__')"
    )
    output = run_python(program, npu_environment("310P3", hbm_bytes=1 << 30, reports=tmp_path))
    found = json.loads(output.splitlines()[-1])
    assert found["device"] == "Ascend310P3"
    assert found["memory"] == 1 << 30
    assert found["product"] == 4 * 32 * 64
    assert found["format"] == "FRACTAL_NZ"
    assert not any(found["takes"].values())
    # Scores are 64 where there is a key of ones and 0 elsewhere: that key has all the weight.
    assert found["cache"] == pytest.approx([1, 1])
    # Its counters lie in a file.
    cost = counts_of(tmp_path, found["pid"])
    assert cost["kernel"] > 10 and cost["synchronize_stream"] >= 2
