"""What operators, CANN and HCCL take of an NPU's memory beside tensors: where it comes from, and that a cache leaves it
to them."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ascend.environment import npu_environment
from tests.ascend.runtime.build import ROOT
from tests.ascend.support import run_python
from tests.support.checkpoints import make_checkpoint

MIB = 1 << 20
HBM, SHARE, RESERVED, WORKSPACE = 640 * MIB, 0.8, 48 * MIB, 64 * MIB
CANN = 5 * MIB  # 256 of 32 GiB
_KERNELS = """
import json
import torch, torch_npu
from torch_npu import npu

def state():
    npu.synchronize()
    free, total = npu.mem_get_info()
    outside = total - free - npu.memory_reserved()
    return {"outside": outside >> 20, "peak": npu.max_memory_allocated() >> 20}

npu.set_device(0)
found = {"at first": state()}
x = torch.ones((16, 16), dtype=torch.float16, device="npu")
found["after a kernel"] = state()
x @ x
found["after a product"] = state()
rows, cache = torch.ones((1, 2, 64), dtype=torch.float16, device="npu"), torch.zeros(
    (2, 128, 2, 64), dtype=torch.float16, device="npu"
)
slots = torch.zeros(1, dtype=torch.int32, device="npu")
torch_npu._npu_reshape_and_cache(rows, rows, cache, cache.clone(), slots)
found["after one of NNAL"] = state()
npu.empty_cache()
found["emptied"] = state()
print(json.dumps(found))
"""


def environment(npu: str = "910B4", **more: str) -> dict[str, str]:
    """Of an NPU with HBM bytes whose operators have large workspaces."""
    found = npu_environment(npu, hbm_bytes=HBM)
    return {**found, "FAKE_NPU_WORKSPACE": str(WORKSPACE), **more}


def test_workspaces_come_from_where_torch_npu_takes_them() -> None:
    found = json.loads(run_python(_KERNELS, environment()).splitlines()[-1])
    outside = {name: each["outside"] for name, each in found.items()}
    assert outside["at first"] == 0
    assert outside["after a kernel"] == outside["after a product"] == CANN // MIB
    # Theirs is out of torch's pools while they run; that of NNAL's is beside these, and stays.
    assert found["after a kernel"]["peak"] < WORKSPACE // MIB <= found["after a product"]["peak"]
    assert CANN + WORKSPACE <= outside["after one of NNAL"] * MIB <= CANN + WORKSPACE + 2 * MIB
    assert outside["emptied"] == CANN // MIB


def fill(tmp_path: Path, npu: str, **options: Any) -> dict[str, int]:
    """What a decoder does that may have all that other processes leave of the device."""
    folder = make_checkpoint(tmp_path, "llama", text={"max_position_embeddings": 4096})
    wanted = {
        "device": "npu",
        "gpu_memory_utilization": SHARE,
        "npu_reserved_memory": RESERVED,
        "num_host_blocks": 0,
        "max_num_batched_tokens": 256,
        "max_model_len": 4096,
        "max_num_seqs": 128,
        "graphs": "off",  # whose memory would make up for a workspace that was forgotten
        **options,
    }
    others = str(HBM - int(SHARE * HBM))
    program = ROOT / "tests" / "ascend" / "programs" / "full_device.py"
    code = f"""
import runpy, sys
sys.argv = {["full_device.py", str(folder), json.dumps(wanted)]!r}
runpy.run_path({str(program)!r}, run_name="__main__")
"""
    said = run_python(code, environment(npu, FAKE_NPU_FOREIGN_BYTES=others))
    answer: dict[str, int] = json.loads(said.splitlines()[-1])
    return answer


@pytest.mark.full
@pytest.mark.parametrize("npu", ["910B4", "310P3"])
def test_the_largest_step_runs_beside_a_cache_that_fills_the_device(
    npu: str, tmp_path: Path
) -> None:
    found = fill(tmp_path, npu)
    assert found["emptied"] == 0
    assert WORKSPACE < found["took"] <= found["predicted"]
    # The reserve is still there, and little more: on a 310P half of what there is stays free.
    if npu == "910B4":
        assert RESERVED // 2 <= found["free"] <= RESERVED + found["predicted"] + 8 * MIB
