"""Each fault of a machine is a message with its cause and its remedy."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.launcher.ascend import host
from services.launcher.doctor import ascend_diagnosis
from services.launcher.doctor.finding import Finding
from shared.cpu_kernels import compiling
from shared.errors import InvalidRequest
from tests.support.processes.ascend_machine import HELD_910B, INFO_310P, AscendMachine

pytestmark = pytest.mark.skipif(compiling.compiler() is None, reason="there is no compiler here")
NOBODY = 65534


@pytest.fixture
def machine() -> Iterator[AscendMachine]:
    # A folder that users other than root may enter, too.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield AscendMachine(Path(folder))


def faults(machine: AscendMachine) -> dict[str, Finding]:
    """What -> finding, of those that are missing."""
    found = ascend_diagnosis.examine(machine.host())
    return {finding.what: finding for finding in found if finding.mark == "missing"}


def the_fault(machine: AscendMachine, what: str) -> Finding:
    """The only fault."""
    found = faults(machine)
    assert list(found) == [what]
    assert found[what].remedy
    return found[what]


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may open every file."""
    if os.geteuid() != 0:
        yield
        return
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


def test_a_machine_in_order_has_no_faults(machine: AscendMachine) -> None:
    findings = {finding.what: finding for finding in ascend_diagnosis.examine(machine.host())}
    assert [one.what for one in findings.values() if one.mark != "ok"] == []
    assert findings["npu devices"].found == "davinci0, davinci1"
    assert findings["npu driver"].found == "25.2.0"
    assert findings["npu firmware"].found == "7.7.0.6.236"
    assert findings["npu 0"].found == "910B3, health OK, 60.7 of 64.0 GiB free"
    assert findings["CANN"].found == "9.0.0 in /usr/local/Ascend/ascend-toolkit/latest"
    assert findings["versions"].found == "torch_npu 2.9.0.post2 belongs to CANN 9.0.0"
    assert findings["import torch_npu"].found == "2.9.0.post2, 2 device(s)"
    ascend_diagnosis.require_usable(machine.host())


def test_no_device_files(machine: AscendMachine) -> None:
    for chip in machine.host().chips():
        chip.unlink()
    machine.environment["FAKE_DEVICES"] = "0"
    found = faults(machine)["npu devices"]
    assert "no driver is loaded, or this container was not given the device" in found.found
    assert "npu-smi info" in found.remedy


def test_a_device_file_that_this_user_may_not_open(machine: AscendMachine) -> None:
    chip = machine.host().path("/dev/davinci1")
    chip.chmod(0o060 if os.geteuid() == 0 else 0o000)
    with as_nobody():
        found = [*ascend_diagnosis._device_files(machine.host())]
    assert [finding.what for finding in found] == ["/dev/davinci1"]
    assert "this user cannot open it: its mode is 00" in found[0].found
    assert "usermod -aG" in found[0].remedy
    assert f"NPU_GROUP={chip.stat().st_gid}" in found[0].remedy


def test_a_control_file_that_a_container_was_not_given(machine: AscendMachine) -> None:
    machine.host().path("/dev/hisi_hdc").unlink()
    found = the_fault(machine, "/dev/hisi_hdc")
    assert "name it under `devices`" in found.remedy


def test_only_devices_that_are_visible_count(machine: AscendMachine) -> None:
    machine.host().path("/dev/davinci1").unlink()
    machine.host().path("/dev/davinci1").symlink_to("davinci1")  # cannot be opened
    assert "/dev/davinci1" in faults(machine)
    machine.environment["ASCEND_RT_VISIBLE_DEVICES"] = "0"
    assert faults(machine) == {}
    machine.environment["ASCEND_RT_VISIBLE_DEVICES"] = "7"
    assert "names none of the devices here (0, 1)" in faults(machine)["npu devices"].found


def test_memory_that_another_process_holds(machine: AscendMachine) -> None:
    machine.npu_smi(HELD_910B)
    found = the_fault(machine, "npu 0 memory")
    assert found.found == "37.0 GiB are held by other processes: 1333928 python3, 1333930"
    assert "ps -fp 1333928,1333930" in found.remedy
    machine.environment["ASCEND_RT_VISIBLE_DEVICES"] = "1"
    assert faults(machine) == {}


def test_a_chip_that_is_not_healthy(machine: AscendMachine) -> None:
    machine.npu_smi(INFO_310P)
    found = faults(machine)
    assert set(found) == {"npu 0 memory", "npu 1"}
    assert "310P3, health Warning" in found["npu 1"].found
    assert "npu-smi info -t health -i 32768" in found["npu 1"].remedy


def notes(machine: AscendMachine) -> dict[str, Finding]:
    """What -> finding, of those that not everybody needs."""
    return {one.what: one for one in ascend_diagnosis.examine(machine.host()) if one.mark == "note"}


def test_modules_that_the_compiler_of_operators_lacks(
    machine: AscendMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "CANN's compiler" not in notes(machine)
    monkeypatch.setattr(host, "COMPILER_MODULES", ("scipy", "no_such_module"))
    found = notes(machine)["CANN's compiler"]
    assert found.found.endswith("imports: no_such_module")
    assert "'.[npu]'" in found.remedy


def test_a_compiler_of_operators_that_wants_an_older_numpy(machine: AscendMachine) -> None:
    machine.cann("8.5.0")
    assert "error 500001" in notes(machine)["CANN's compiler"].remedy


def test_a_driver_that_does_not_answer(machine: AscendMachine) -> None:
    machine.npu_smi("dcmi module initialize failed. ret is -8005\n", status=255)
    found = the_fault(machine, "npu driver")
    assert found.found == "npu-smi fails: dcmi module initialize failed. ret is -8005"
    assert "reboot after an upgrade" in found.remedy
    machine.host().path("/usr/local/bin/npu-smi").unlink()
    assert faults(machine) == {}  # devices may still work: a note


def test_no_cann(machine: AscendMachine) -> None:
    machine.without_library("libascendcl.so")
    machine.without_library("libhccl.so")
    machine.host().path("/usr/local/Ascend/ascend-toolkit/set_env.sh").unlink()
    del machine.environment["ASCEND_HOME_PATH"]
    found = the_fault(machine, "CANN")
    assert found.found == "is not installed"
    assert "install CANN's toolkit" in found.remedy


@pytest.mark.parametrize(
    ("what", "variable", "library", "script"),
    [
        ("CANN", "ASCEND_HOME_PATH", "libhccl.so", "ascend-toolkit/set_env.sh"),
        ("NNAL", "ATB_HOME_PATH", "libatb.so", "nnal/atb/set_env.sh"),
    ],
)
def test_a_set_env_that_was_not_sourced(
    what: str, variable: str, library: str, script: str, machine: AscendMachine
) -> None:
    machine.without_library(library)
    del machine.environment[variable]
    found = the_fault(machine, what)
    assert f"{variable} is not set" in found.found
    assert found.remedy == f"source /usr/local/Ascend/{script}"


def test_a_variable_that_names_nothing(machine: AscendMachine) -> None:
    machine.without_library("libhccl.so")
    machine.host().path("/usr/local/Ascend/ascend-toolkit/set_env.sh").unlink()
    machine.environment["ASCEND_HOME_PATH"] = "/opt/cann"
    assert (
        "ASCEND_HOME_PATH names /opt/cann, which is not there" in the_fault(machine, "CANN").found
    )


def test_a_library_that_does_not_load_is_named(machine: AscendMachine) -> None:
    machine.without_library("libhccl.so")
    found = the_fault(machine, "CANN")
    assert "libhccl.so does not load: libhccl.so: cannot open shared object file" in found.found


def test_torch_npu_is_not_installed(machine: AscendMachine) -> None:
    machine.host().path("/packages/torch_npu/__init__.py").unlink()
    machine.host().path("/packages/torch_npu").rmdir()
    machine.host().path("/packages/torch_npu-2.9.0.post2.dist-info/METADATA").unlink()
    found = faults(machine)["torch_npu"]
    assert found.found == "is not installed"
    assert "torch_npu==2.9.0.*" in found.remedy


def test_a_torch_of_another_version(machine: AscendMachine) -> None:
    machine.package("torch", "2.13.0+cpu")
    found = the_fault(machine, "torch_npu")
    assert found.found == "2.9.0.post2 was built for torch 2.9.0, and torch 2.13.0+cpu is installed"
    index = "https://download.pytorch.org/whl/cpu"
    assert found.remedy == f"pip install --extra-index-url {index} torch==2.9.0"


def test_a_cann_that_is_too_old(machine: AscendMachine) -> None:
    machine.cann("8.5.0")
    found = the_fault(machine, "versions")
    assert found.found == "torch_npu 2.9.0.post2 is made for CANN 9.0.0, and this is 8.5.0"
    assert "a torch_npu for 8.5.0: 2.9.0, 2.8.0.post2" in found.remedy


def test_a_newer_cann_is_a_note(machine: AscendMachine) -> None:
    machine.cann("9.1.0")
    notes = [one.what for one in ascend_diagnosis.examine(machine.host()) if one.mark == "note"]
    assert notes == ["versions"]


def test_a_runtime_that_does_not_start(machine: AscendMachine) -> None:
    machine.environment["FAKE_STATUS"] = "507899"
    assert "does not start: error 507899" in the_fault(machine, "npu runtime").found


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (
            "ImportError('libhccl.so: cannot open shared object file: No such file or directory')",
            "source /usr/local/Ascend/ascend-toolkit/set_env.sh",
        ),
        (
            "ImportError('libop_plugin_atb.so: undefined symbol: _ZN3atb9OperationD2Ev')",
            "docs/ascend.md has the table",
        ),
        (
            "RuntimeError('Two accelerators cannot be used at the same time')",
            "TORCH_INDEX=https://download.pytorch.org/whl/cpu",
        ),
    ],
)
def test_an_import_that_fails(error: str, remedy: str, machine: AscendMachine) -> None:
    machine.write("/packages/torch_npu/__init__.py", f"raise {error}")
    found = the_fault(machine, "import torch_npu")
    assert error.split("'")[1] in found.found
    assert remedy in found.remedy


def test_serve_is_refused_with_the_first_fault(machine: AscendMachine) -> None:
    machine.package("torch", "2.13.0+cpu")
    with pytest.raises(
        InvalidRequest, match=r"--device npu: torch_npu: 2\.9\.0\.post2 was built for"
    ):
        ascend_diagnosis.require_usable(machine.host())
