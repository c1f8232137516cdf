"""Whether HCCL joins all NPUs that this process sees: `results` starts a process for each, the program
`python -m services.decoder.devices.npu.checks.ranks_check RANK RANKS MEETING`, of which the first prints what came of
it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch_npu
from torch import Tensor

from services.decoder.devices.npu.device import NpuDevice
from services.decoder.devices.npu.errors import explain
from services.decoder.ranks.rank_group import RankGroup, connect, disconnect
from services.decoder.ranks.share import Share
from shared.child_process.die_with_parent import die_with_parent
from shared.hardware.ascend import ENVIRONMENT
from shared.hardware.operation_check import Case, Result, print_results, read_result, try_case
from shared.settings import (
    VISIBLE_NPUS,
    child_environment,
    listed_in_environment,
    python_path,
    unless_set,
)

_ROOT = Path(__file__).parents[5]
_LONGEST_S = 300.0
# A step of one row of a model with 7 billion parameters, and one of many rows.
_ROWS, _HIDDEN = (1, 2048), 3584
_VOCABULARY = 32_000


def results() -> Iterator[Result]:
    """What the first of the processes says, and of one that fails the reason."""
    size = int(torch_npu.npu.device_count())
    if size < 2:
        yield Result("HCCL", True, detail="one NPU is visible: there is nothing to join")
        return
    meeting = os.memfd_create("tessera-check")
    processes = [_start(rank, size, meeting) for rank in range(size)]
    said: list[str] = []
    try:
        for process in processes:
            said.append(process.communicate(timeout=_LONGEST_S)[0])
    except subprocess.TimeoutExpired:
        yield Result(f"HCCL of {size} NPUs", False, detail=f"no end within {_LONGEST_S:.0f} s")
        return
    finally:
        for process in processes:
            process.kill()
            process.wait()
        os.close(meeting)
    for rank, (process, text) in enumerate(zip(processes, said, strict=True)):
        found = [result for line in text.splitlines() if (result := read_result(line)) is not None]
        yield from (result for result in found if not rank or not result.ok)
        if process.returncode and all(result.ok for result in found):
            last = (text.strip().splitlines() or [f"status {process.returncode}"])[-1]
            yield Result(f"HCCL of {size} NPUs, rank {rank}", False, detail=last)


def _start(rank: int, size: int, meeting: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, str(rank), str(size), f"/proc/self/fd/{meeting}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=child_environment(
            PYTHONPATH=python_path(_ROOT, _ROOT / "protos"),
            **{VISIBLE_NPUS: listed_in_environment(VISIBLE_NPUS, rank) or str(rank)},
            **unless_set(**ENVIRONMENT),
        ),
        pass_fds=(meeting,),
        preexec_fn=die_with_parent(),
    )


class _Cases:
    """Of one rank; every rank has the same ones, in the same order."""

    def __init__(self, ranks: RankGroup, device: torch.device) -> None:
        self._ranks, self._device = ranks, device

    def __iter__(self) -> Iterator[Case]:
        size, own = self._ranks.share.size, self._ranks.share.rank
        for rows in _ROWS:
            row = torch.arange(_HIDDEN).remainder(7).half()
            x = row.expand(rows, -1) + own
            total = size * row + sum(range(size))
            yield Case(
                f"HCCL, sum of {size} NPUs, {rows} rows of {_HIDDEN}",
                partial(self._sum, x.to(self._device)),
                [total.expand(rows, -1)],
                x.nbytes,
                0.0,
            )
        first, last = self._ranks.share.range(_VOCABULARY)
        logits = torch.arange(_VOCABULARY).float().expand(2, -1)[:, first:last].contiguous()
        yield Case(
            f"HCCL, logits of {size} NPUs joined",
            partial(self._join, logits.to(self._device)),
            [torch.arange(_VOCABULARY).float().expand(2, -1)],
            2 * 4 * _VOCABULARY,
            0.0,
        )

    def _sum(self, x: Tensor) -> tuple[Tensor]:
        return (self._ranks.sum(x.clone()),)

    def _join(self, logits: Tensor) -> tuple[Tensor]:
        return (self._ranks.join(logits, _VOCABULARY),)


def main(rank: int, size: int, meeting: Path) -> int:
    """Prints a line for each result as it comes."""
    device = NpuDevice(torch.float16)
    ranks = connect(Share(rank, size), device.rank_backend, meeting)
    with torch.inference_mode():
        cases = _Cases(ranks, device.ops.device)
        status = print_results(
            try_case(case, "float16", device.synchronize, explain) for case in cases
        )
    disconnect()
    return status


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
