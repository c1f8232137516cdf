"""Two processes with a simulated NPU each, joined by torch's own process group for HCCL."""

import json
import subprocess
import sys
from pathlib import Path

from tests.ascend.environment import npu_environment


def test_two_ranks(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.ascend.programs.rank",
                str(rank),
                str(tmp_path / "store"),
            ],
            env={
                **npu_environment(devices=2),
                "ASCEND_RT_VISIBLE_DEVICES": str(rank),
                # One rank may be ready long before the other on a busy machine.
                "FAKE_HCCL_TIMEOUT_MS": "100000",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0]
    # What the ranks share lies in memory that is theirs alone, and goes with them.
    assert not [*Path("/dev/shm").glob(f"fake-hccl-{ranks[0].pid}-*")]
    first, second = (json.loads(output.splitlines()[-1]) for output in outputs)
    assert "EI0006" in first.pop("alone")  # rank 1 has ended
    assert first == second
    for kind in ("float32", "float16", "bfloat16", "int32", "int64"):
        assert first[f"sum of torch.{kind}"] == [3] * 4
    assert first["largest"] == [2] * 4
    assert first["gathered"] == [1] * 4 + [2] * 4
    assert first["broadcast"] == [2] * 4
    assert first["host waits"] == 0
    assert first["replays"] == [7, 31]
    # Two buffers of 200 MiB, a sixteenth as large as the memory is here.
    assert first["memory of HCCL"] == 2 * (200 << 20) // 16
