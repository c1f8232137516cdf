"""No two processes take one NPU for themselves, and none stays taken behind a process that is gone."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.decoder.settings import DecoderSettings
from shared.errors import InvalidRequest, Unavailable
from shared.hardware import npu_leases
from shared.settings import python_path

ROOT = Path(__file__).parents[3]
_HOLDER = """
import sys
from shared.hardware import npu_leases
print(*npu_leases.take([0, 1, 2, 3], 2, 2, ["decoder"]), flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TESSERA_NPU_LEASE_DIR", str(tmp_path / "leases"))
    monkeypatch.setattr(npu_leases, "_held", [])
    return tmp_path / "leases"


def holder() -> "subprocess.Popen[str]":
    """A process that takes two of four devices."""
    return subprocess.Popen(
        [sys.executable, "-c", _HOLDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": python_path(ROOT)},
    )


def said(process: "subprocess.Popen[str]") -> list[int]:
    assert process.stdout is not None
    return [int(number) for number in process.stdout.readline().split()]


def test_processes_share_no_device_and_leave_none_taken() -> None:
    processes = [holder() for _ in range(2)]
    try:
        taken = [said(process) for process in processes]
        assert sorted(taken[0] + taken[1]) == [0, 1, 2, 3]
        with pytest.raises(
            Unavailable, match="2 of the NPUs 0, 1, 2, 3 are needed, and of these 0"
        ):
            npu_leases.take([0, 1, 2, 3], 2, 2, ["decoder"])
        processes[0].send_signal(signal.SIGKILL)
        processes[0].wait()
        assert npu_leases.take([0, 1, 2, 3], 1, 4, ["decoder"]) == sorted(taken[0])
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_who_gets_too_few_holds_none() -> None:
    npu_leases.take([1], 1, 1, ["decoder"])
    with pytest.raises(Unavailable, match="of these 2 are free"):
        npu_leases.take([0, 1, 2], 3, 3, ["decoder"])
    assert npu_leases.take([0, 1, 2], 2, 2, ["decoder"]) == [0, 2]


def test_a_system_of_the_host_shares_with_no_container() -> None:
    assert npu_leases.take([0], 1, 1, ["decoder"]) == [0]
    assert npu_leases.take([0], 1, 1, ["vision-encoder"]) == [0]
    assert npu_leases.take([0, 1], 1, 2) == [1]


def settings(**changes: str) -> DecoderSettings:
    return DecoderSettings.model_validate({"model": "somewhere", "device": "npu", **changes})


own = npu_leases.for_decoder


def test_replicas_see_devices_of_their_own_as_cann_counts_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "")
    listed = settings(npu_devices="4-7,2", npu_devices_beside="5")
    visible, shares = [], []
    for count in (1, 2, 2):
        found = own(listed, count)
        visible.append(os.environ["ASCEND_RT_VISIBLE_DEVICES"])
        shares.append(found.gpu_memory_utilization)
    assert visible == ["0", "1,2", "3,4"]
    assert shares == [None, 0.75, None]
    with pytest.raises(SystemExit):
        own(listed, 1)


def test_a_share_that_was_given_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_DECODER_GPU_MEMORY_UTILIZATION", "0.5")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "")
    assert own(settings(npu_devices="0", npu_devices_beside="0"), 1).gpu_memory_utilization == 0.5


@pytest.mark.parametrize("text", ["1-", "a", "3-1", "0;1", "-2", ",", "1,,2"])
def test_what_is_no_list_of_devices_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="no list of NPUs"):
        npu_leases.numbers(text)


def test_a_list_names_each_device_once() -> None:
    assert npu_leases.numbers("6, 0-2,1") == [0, 1, 2, 6]


def test_a_lease_is_never_another_file_that_a_link_names(folder: Path, tmp_path: Path) -> None:
    folder.mkdir()
    (folder / "decoder-0").symlink_to(tmp_path)
    with pytest.raises(Unavailable, match="TESSERA_NPU_LEASE_DIR"):
        npu_leases.take([0], 1, 1, ["decoder"])
