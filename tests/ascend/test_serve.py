"""`tessera serve` and `tessera doctor` on the simulated NPU: every service a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.ascend.support import run_new_python
from tests.support.processes.demo_question import ask, unseen
from tests.support.processes.system import System


def test_who_asks_whether_torch_npu_is_there_gets_the_simulator_all_the_same() -> None:
    code = """
import importlib.util
assert importlib.util.find_spec("torch_npu")
import torch, torch_npu
print(torch_npu.npu_swiglu(torch.ones(1, 64, dtype=torch.float16, device="npu")).shape)
"""
    assert "torch.Size([1, 32])" in run_new_python(code, os.environ)


def test_a_picture_is_answered_from_npus_that_no_other_system_gets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FAKE_NPU_COUNT", "3")
    monkeypatch.setenv("TESSERA_NPU_LEASE_DIR", str(tmp_path / "leases"))
    with System(None, "--device", "npu", "--decoders", "2", "--max-num-seqs", "4") as system:
        answer = ask(system.base_url)
        assert unseen(answer) == [], answer
        devices = [line for line in system.log.splitlines() if "device=npu" in line]
        processes = {line.split("|")[0].strip() for line in devices}
        assert processes == {"decoder-0", "decoder-1", "vision-encoder"}
        pids = system.pids()
        seen = [visible(pid) for pid in (*pids["decoder"], *pids["vision_encoder"])]
        assert sorted(seen) == ["0", "1", "2"]
        assert seen[-1] == "2"
        with pytest.raises(AssertionError, match=r"1 of the NPUs 0, 1, 2 are needed.* 0 are free"):
            System(None, "--device", "npu").start()


def visible(pid: int) -> str:
    """The devices that a process sees."""
    return psutil.Process(pid).environ()["ASCEND_RT_VISIBLE_DEVICES"]


def test_doctor_finds_nothing_missing() -> None:
    command = [sys.executable, "-m", "services.launcher", "doctor", "--device", "npu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout
    assert "1, as CANN's runtime counts them" in done.stdout
    assert not re.search(r"^ok +npu +none$", done.stdout, re.MULTILINE)
    assert "2.13.0, 1 device(s)" in done.stdout
