"""The environment in which processes find the simulated NPU: `npu_environment()`, and a program for `make test-npu`.

`python -m tests.ascend.environment [--npu 910B4] [--devices 1] program argument ...` becomes a program in it, after
installing torch_npu into build/npu and building the runtime. Where there is no C++ compiler it says so and does
nothing, or fails if CI is true.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.ascend.runtime.build import LIBRARIES, ROOT, WHEEL, build

TORCH_NPU = os.environ.get("TESSERA_TEST_TORCH_NPU") or "2.13.0"
_SITE = Path(__file__).parent / "site"
# Of the sizes of real devices, what the memory of a machine with tests bears.
_HBM_SHARE = 16
_GIB = 1 << 30
_HBM = {"910B4": 32 * _GIB, "910B3": 64 * _GIB, "310P3": 24 * _GIB}


def npu_environment(
    npu: str = "910B4",
    *,
    devices: int = 1,
    hbm_bytes: int | None = None,
    reports: Path | None = None,
    sanitize: bool = False,
    base: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """`base` with what a process needs to find `devices` simulated NPUs.

    `hbm_bytes` is their memory, a sixteenth of the real one unless given; in the folder `reports` each process keeps
    its counters (`simulator.runtime.report_of`). With `sanitize` torch_npu's own sanitizer raises where
    streams use one tensor in no order.
    """
    set_here = {
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # services import torch_npu themselves, when they are to use it
        "TASK_QUEUE_ENABLE": "0",  # its thread and kernels in Python wait for each other
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "LD_LIBRARY_PATH": _joined(LIBRARIES, base.get("LD_LIBRARY_PATH")),
        "PYTHONPATH": _joined(_SITE, WHEEL.parent, ROOT, ROOT / "protos", base.get("PYTHONPATH")),
        # Devices that are simulated here are others than those of other folders.
        "TESSERA_NPU_LEASE_DIR": str(LIBRARIES.parent / "npu_leases"),
        "FAKE_NPU_SOC": f"Ascend{npu}",
        "FAKE_NPU_COUNT": str(devices),
        "FAKE_NPU_BYTES": str(_HBM[npu] // _HBM_SHARE if hbm_bytes is None else hbm_bytes),
    }
    if sanitize:
        set_here["TORCH_NPU_SANITIZER"] = "1"
    if reports is not None:
        set_here["FAKE_NPU_REPORTS"] = str(reports)
    return {**base, **set_here}


def _joined(*paths: Path | str | None) -> str:
    """A search path, each folder once."""
    parts = (part for path in paths if path for part in str(path).split(os.pathsep))
    return os.pathsep.join(dict.fromkeys(parts))


def prepare() -> str:
    """Installs and builds what is missing. Returns why that is impossible, or ""."""
    missing = [tool for tool in ("g++", "nm") if shutil.which(tool) is None]
    if missing:
        return f"there is no {' and no '.join(missing)} here"
    if not WHEEL.is_dir():
        print(f"Installing torch_npu {TORCH_NPU} into {WHEEL.parent} ...", flush=True)
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            str(WHEEL.parent),
        ]
        subprocess.run([*pip, f"torch_npu=={TORCH_NPU}"], check=True)
    build()
    return ""


def main(arguments: list[str]) -> int:
    """Becomes the program, or returns an exit status: 0 if it was left out."""
    parser = argparse.ArgumentParser(prog="python -m tests.ascend.environment")
    parser.add_argument("--npu", choices=_HBM, default="910B4", help="the chip")
    parser.add_argument("--devices", type=int, default=1, help="how many there are")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args(arguments)
    problem = prepare()
    if problem:
        print(f"What needs the simulated NPU is left out: {problem}.", file=sys.stderr)
        return 1 if os.environ.get("CI") == "true" else 0
    environment = npu_environment(given.npu, devices=given.devices)
    sys.stdout.flush()
    os.execvpe(given.command[0], given.command, environment)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
