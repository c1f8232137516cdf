"""Which device and element type are chosen on which machine, and what is said where there is none."""

import ctypes
import importlib.util
from importlib.machinery import ModuleSpec
from typing import Any

import pytest

from shared.errors import InvalidRequest
from shared.hardware import ascend, devices


class Cann:
    """The runtime's library, as `ctypes` would load it."""

    def __init__(self, chip: str, count: int, status: int) -> None:
        self._chip, self._count, self._status = chip, count, status

    def aclrtGetDeviceCount(self, count: Any) -> int:
        """Writes the number of devices."""
        count._obj.value = self._count
        return self._status

    @property
    def aclrtGetSocName(self) -> Any:
        """A function that returns the chip's name."""

        def name() -> bytes:
            return self._chip.encode()

        return name


@pytest.fixture(autouse=True)
def _nothing_is_remembered() -> Any:
    for found in (ascend.npu_fault, ascend.npu_name, devices.cuda_fault):
        found.cache_clear()
    yield
    for found in (ascend.npu_fault, ascend.npu_name, devices.cuda_fault):
        found.cache_clear()


def pretend(
    monkeypatch: pytest.MonkeyPatch,
    chip: str = "Ascend910B4",
    *,
    count: int = 1,
    status: int = 0,
    missing: str = "",
) -> None:
    """A machine with torch_npu, CANN and so many NPUs, but without the library `missing`."""
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, None) if name == "torch_npu" else real(name, package)

    def load(name: str) -> Cann:
        if name == missing or "cuda" in name:
            raise OSError(f"{name}: cannot open shared object file")
        return Cann(chip, count, status)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(ctypes, "CDLL", load)


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        ({"missing": "libascendcl.so"}, "source /usr/local/Ascend/ascend-toolkit/set_env.sh"),
        ({"status": 507899}, "driver finds no device .error 507899"),
        ({"count": 0}, "shows no device; see ASCEND_RT_VISIBLE_DEVICES"),
        (
            {"chip": "Ascend310P3", "missing": "libatb.so"},
            "source /usr/local/Ascend/nnal/atb/set_env.sh",
        ),
    ],
)
def test_what_an_npu_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch, machine: dict[str, Any], said: str
) -> None:
    pretend(monkeypatch, **machine)
    with pytest.raises(InvalidRequest, match=f"--device npu: .*{said}.*or give --device cpu"):
        devices.resolve_device("npu")
    assert devices.resolve_device("auto") == "cpu"


def test_an_npu_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    assert devices.resolve_device("npu") == devices.resolve_device("auto") == "npu"


@pytest.mark.parametrize(
    ("chip", "default", "refused"),
    [
        ("Ascend910B4", "bfloat16", ["float32"]),
        ("Ascend910_9391", "bfloat16", ["float32"]),
        ("Ascend310P3", "float16", ["float32", "bfloat16"]),
    ],
)
def test_the_types_of_each_chip(
    monkeypatch: pytest.MonkeyPatch, chip: str, default: str, refused: list[str]
) -> None:
    pretend(monkeypatch, chip)
    assert devices.default_dtype("npu") == default
    for dtype in devices.DTYPES:
        if dtype in refused:
            with pytest.raises(InvalidRequest, match=f"--dtype {dtype} .*: use {default}"):
                devices.require_computable("npu", dtype)
        else:
            devices.require_computable("npu", dtype)
