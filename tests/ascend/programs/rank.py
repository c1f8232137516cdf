"""One of two ranks: `rank.py RANK STORE`. Prints what torch's collectives over HCCL gave it, as JSON.

After that rank 1 ends without a word, and rank 0 says what its next collective raises.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
from torch import Tensor
from torch_npu import npu

from tests.ascend.simulator.counters import counted, synchronisations


def full(rank: int, dtype: torch.dtype) -> Tensor:
    """1 on rank 0, 2 on rank 1."""
    return torch.full((4,), rank + 1, dtype=dtype, device="npu")


def outside() -> int:
    """Bytes of the device that torch's pools do not hold."""
    free, total = npu.mem_get_info()
    return int(total - free - npu.memory_reserved())


def collectives(rank: int) -> dict[str, Any]:
    """Each of them once."""
    full(rank, torch.float32)  # the first kernel
    found: dict[str, Any] = {"memory before": outside()}
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64):
        x = full(rank, dtype)
        dist.all_reduce(x)
        found[f"sum of {dtype}"] = x.tolist()
    found["memory of HCCL"] = outside() - found.pop("memory before")
    x = full(rank, torch.float16)
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    found["largest"] = x.tolist()
    gathered = torch.zeros(8, dtype=torch.int32, device="npu")
    dist.all_gather_into_tensor(gathered, full(rank, torch.int32))
    found["gathered"] = gathered.tolist()
    x = full(rank, torch.float32)
    dist.broadcast(x, 1)
    found["broadcast"] = x.tolist()
    with counted() as cost:
        dist.all_reduce(x)
    found["host waits"] = synchronisations(cost)
    dist.barrier()
    return found


def replays(rank: int) -> list[float]:
    """Of a graph with an all_reduce inside."""
    x = full(rank, torch.float32)
    graph = npu.NPUGraph()
    with npu.graph(graph):
        y = x * 2
        dist.all_reduce(y)
        z = y + 1
    found = []
    for factor in (1.0, 5.0):
        x.fill_(factor * (rank + 1))
        graph.replay()
        found.append(z[0].item())
    return found


def main(rank: int, store: Path) -> None:
    """Ends the process."""
    npu.set_device(0)
    dist.init_process_group("hccl", init_method=f"file://{store}", rank=rank, world_size=2)
    found: dict[str, Any] = {**collectives(rank), "replays": replays(rank)}
    if rank == 0:
        os.environ["FAKE_HCCL_TIMEOUT_MS"] = "1000"
        try:
            dist.all_reduce(x := full(rank, torch.float32))
            x.cpu()
        except RuntimeError as error:
            found["alone"] = str(error)
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
