"""compose.ascend.yaml as Docker Compose reads it; no daemon is needed, and no NPU."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FILES = ("compose.yaml", "compose.ascend.yaml")
COMPUTING = ("decoder", "vision-encoder")


def services(*more: str, **variables: str) -> dict[str, Any]:
    """The services of all files together."""
    files = [part for name in (*FILES, *more) for part in ("-f", name)]
    return _read(["docker", "compose", *files], variables)


def scaled(**variables: str) -> dict[str, Any]:
    """The services as `compose.ascend.sh` starts them."""
    return _read(["./compose.ascend.sh"], variables)


def _read(compose: list[str], variables: dict[str, str]) -> dict[str, Any]:
    try:
        done = subprocess.run(
            [*compose, "config", "--format", "json"],
            cwd=ROOT,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/nonexistent", **variables},
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("docker is not installed")
    if "is not a docker command" in done.stderr or "unknown shorthand flag" in done.stderr:
        pytest.skip("docker compose is not installed")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)["services"]
    return found


def sources(service: dict[str, Any]) -> dict[str, Any]:
    """Source -> mount."""
    return {mount["source"]: mount for mount in service["volumes"]}


@pytest.mark.parametrize("name", COMPUTING)
def test_a_service_that_computes_gets_the_device_and_its_driver(name: str) -> None:
    service = services()[name]
    assert [device["source"] for device in service["devices"]] == [
        "/dev/davinci0",
        "/dev/davinci_manager",
        "/dev/devmm_svm",
        "/dev/hisi_hdc",
    ]
    assert service["group_add"] == ["1000"]
    assert service["ulimits"] == {"memlock": -1}
    mounts = sources(service)
    for driver in (
        "/usr/local/dcmi",
        "/usr/local/bin/npu-smi",
        "/usr/local/Ascend/driver/lib64",
        "/usr/local/Ascend/driver/tools",
        "/usr/local/Ascend/driver/version.info",
        "/etc/ascend_install.info",
    ):
        assert mounts[driver]["read_only"]
        assert mounts[driver]["target"] == driver
    assert {"artifacts", "secrets"} < mounts.keys()  # those of compose.yaml stay
    assert mounts["npu-kernels"]["target"] == service["environment"]["ASCEND_CACHE_PATH"]
    assert service["environment"]["XDG_CACHE_HOME"].startswith(
        f"{mounts['npu-kernels']['target']}/"
    )
    assert mounts["npu-leases"]["target"] == service["environment"]["TESSERA_NPU_LEASE_DIR"]
    assert service["shm_size"] == str(1 << 30)
    assert service["build"]["dockerfile"] == "Dockerfile.ascend"
    assert service["build"]["target"] == name


def test_each_service_gets_the_devices_of_its_list() -> None:
    found = scaled(ASCEND_DECODER_DEVICES="6,0-2", ASCEND_ENCODER_DEVICES="7")
    for name, numbers, own, beside in (
        ("decoder", (0, 1, 2, 6), "6,0-2", "7"),
        ("vision-encoder", (7,), "7", "6,0-2"),
    ):
        *chips, _, _, _ = (device["source"] for device in found[name]["devices"])
        assert chips == [f"/dev/davinci{number}" for number in numbers]
        prefix = f"TESSERA_{name.replace('-', '_').upper()}_NPU_DEVICES"
        environment = found[name]["environment"]
        assert (environment[prefix], environment[f"{prefix}_BESIDE"]) == (own, beside)
    assert scaled() == services()


@pytest.mark.parametrize("listed", ["1-", "a", "3-1", "0;1", "-2"])
def test_what_is_no_list_of_devices_is_refused(listed: str) -> None:
    done = subprocess.run(
        ["./compose.ascend.sh", "config"],
        cwd=ROOT,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "ASCEND_DECODER_DEVICES": listed},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert f"'{listed}' is no list of devices" in done.stderr


def test_flags_of_the_decoder_and_variables_of_hccl_are_passed_on() -> None:
    given = {
        "TESSERA_TENSOR_PARALLEL_SIZE": "4",
        "TESSERA_GRAPHS": "auto",
        "TESSERA_NPU_RESERVED_MEMORY": "3000000000",
        "TESSERA_NPU_FORMS": "-TND",
        "HCCL_BUFFSIZE": "512",
    }
    environment = services(**given)["decoder"]["environment"]
    for name, value in given.items():
        own = name.replace("TESSERA_", "TESSERA_DECODER_")
        assert environment[own] == value
    # A variable that is not set here is not empty there, but not there, so that what the service sets holds.
    assert environment.get("HCCL_EXEC_TIMEOUT") is None


@pytest.mark.parametrize("name", COMPUTING)
def test_what_cann_writes_lies_in_memory(name: str) -> None:
    service = services()[name]
    assert service["read_only"]
    assert service["tmpfs"] == ["/tmp"]
    for variable in ("HOME", "ASCEND_PROCESS_LOG_PATH"):
        assert service["environment"][variable].startswith("/tmp/")


def test_other_services_stay_as_they_are() -> None:
    others = services()
    for name in ("gateway", "preprocess", "scheduler", "redis"):
        assert "devices" not in others[name]
        assert "ascend" not in json.dumps(others[name])


def test_group_and_versions_can_be_chosen() -> None:
    decoder = services(
        NPU_GROUP="1099", NPU_SMI="/usr/local/sbin/npu-smi", TORCH="2.10.0", TORCH_INDEX=""
    )["decoder"]
    assert decoder["group_add"] == ["1099"]
    assert sources(decoder)["/usr/local/sbin/npu-smi"]["target"] == "/usr/local/bin/npu-smi"
    assert decoder["build"]["args"]["TORCH"] == "2.10.0"
    assert decoder["build"]["args"]["TORCH_INDEX"] == ""


@pytest.mark.parametrize("name", COMPUTING)
def test_the_simulated_device_takes_the_place_of_device_and_driver_alone(name: str) -> None:
    real, simulated = services()[name], services("tests/ascend/compose.ci.yaml")[name]
    assert "/dev/davinci" not in json.dumps(simulated)
    assert "/usr/local" not in json.dumps(simulated)
    changed = {"build", "devices", "environment", "group_add", "ulimits", "volumes"}
    assert {key: value for key, value in simulated.items() if key not in changed} == {
        key: value for key, value in real.items() if key not in changed
    }
    assert real["environment"].items() <= simulated["environment"].items()
    assert simulated["build"]["dockerfile"] == real["build"]["dockerfile"]
    kept = {"/model", "/artifacts", "/secrets", "/kernels", "/leases"}
    for mount in real["volumes"]:
        assert (mount in simulated["volumes"]) == (mount["target"] in kept)
