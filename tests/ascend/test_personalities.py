"""What the devices differ in: memory, bfloat16, kernels that 310P lacks, and its caches in NZ."""

import pytest

from tests.ascend.environment import npu_environment
from tests.ascend.support import run_python

_REPORT = """
import torch, torch_npu
from torch_npu import npu
from tests.ascend.simulator.errors import Refused
name, half = npu.get_device_name(), dict(dtype=torch.float16, device="npu")
print("device", name, npu.mem_get_info()[1] >> 20)

def tried(what, call):
    try:
        call()
        print(what, "works")
    except Refused as error:
        print(what, "refused:", error)

rows, slots = torch.ones(2, 2, 64, **half), torch.tensor([3, 200], dtype=torch.int32, device="npu")
nd = [torch.zeros(4, 128, 2, 64, **half) for _ in "kv"]
nz = [torch_npu.empty_with_format((4, 8, 128, 16), acl_format=29, **half).zero_() for _ in "kv"]
tried("bfloat16", lambda: torch.ones(4, dtype=torch.bfloat16, device="npu") + 1)
tried("scatter", lambda: torch_npu.npu_scatter_pa_kv_cache(rows, rows, *nd, slots, cache_mode="Norm"))
tried("dynamic_quant", lambda: torch_npu.npu_dynamic_quant(rows))
tried("short rows", lambda: torch_npu.npu_rms_norm(torch.ones(2, 8, **half), torch.ones(8, **half)))

if "310P" in name:
    torch_npu._npu_reshape_and_cache(rows * 3, rows * 3, *nz, slots)
    table, lengths = torch.tensor([[0], [1]], dtype=torch.int32, device="npu"), torch.tensor([4, 73], dtype=torch.int32)
    out = torch.empty(2, 2, 64, **half)
    torch_npu._npu_paged_attention(rows, *nz, 2, 2, 1.0, table, lengths, out)
    print("cache", torch_npu.get_npu_format(nz[0]), int(nz[0].sum()), out.isnan().any().item())

weight = torch_npu.npu_format_cast(torch.ones(32, 64, **half), 29)
print("format", torch_npu.get_npu_format(weight))
tried("product", lambda: torch.nn.functional.linear(torch.ones(4, 64, **half), weight))
tried("view", lambda: weight[:16] + 1)
tried("flat", lambda: weight.view(-1) + 1)
"""


@pytest.mark.parametrize(("npu", "mebibytes"), [("910B4", 2048), ("310P3", 1536)])
def test_device(npu: str, mebibytes: int) -> None:
    lines = run_python(_REPORT, npu_environment(npu)).splitlines()
    found = dict(line.split(" ", 1) for line in lines if " " in line)
    assert found["device"] == f"Ascend{npu} {mebibytes}"
    is_310p = npu == "310P3"
    for what in ("bfloat16", "scatter", "dynamic_quant", "short"):
        assert ("refused" in found[what]) == is_310p, what
    # 910B keeps rows unless it is told otherwise; 310P has weights in NZ, which nobody may view.
    assert found["format"] == ("FRACTAL_NZ" if is_310p else "ND")
    assert "works" in found["product"]
    for what in ("view", "flat"):
        assert ("refused" in found[what]) == is_310p, what
    if is_310p:
        assert found["cache"] == f"FRACTAL_NZ {3 * 2 * 2 * 64} False"
