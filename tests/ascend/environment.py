"""The environment in which processes find the simulated NPU: `npu_environment()`, and a program for `make test-npu`.

`python -m tests.ascend.environment program argument ...` runs a program in it, after installing torch_npu into
build/npu and building the runtime. It says so and does nothing where there is no C++ compiler, or fails if CI is true.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from shared.child_process.die_with_parent import die_with_parent
from shared.hardware.ascend import ENVIRONMENT
from tests.ascend.prepared import ADDRESS
from tests.ascend.runtime.build import LIBRARIES, ROOT, WHEEL, build

TORCH_NPU = os.environ.get("TESSERA_TEST_TORCH_NPU") or "2.13.0"
_SITE = Path(__file__).parent / "site"
# Of the sizes of real devices, what the memory of a machine with tests bears.
_HBM_SHARE = 16
_GIB = 1 << 30
_OF_SERVICES = ("TORCH_DEVICE_BACKEND_AUTOLOAD", "PYTORCH_NPU_ALLOC_CONF")
_HBM = {"910B4": 32 * _GIB, "910B3": 64 * _GIB, "310P3": 24 * _GIB}
CHIPS = tuple(_HBM)


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
    streams use one tensor in no order, in place of the runtime (`runtime/order.cpp`).
    """
    set_here = {
        # As services have it: torch_npu's allocator with segments that grow, and a thread of its own that submits.
        **{name: ENVIRONMENT[name] for name in _OF_SERVICES},
        "TASK_QUEUE_ENABLE": "1",
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
        set_here |= {"TORCH_NPU_SANITIZER": "1", "FAKE_NPU_ORDER": "0"}
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


@contextmanager
def prepared() -> Iterator[dict[str, str]]:
    """The environment, while a process is there that forks for each program that a test runs (`prepared.py`)."""
    with tempfile.TemporaryDirectory(prefix="npu-", dir="/tmp") as folder:
        address = Path(folder) / "socket"
        environment = {**npu_environment(), ADDRESS: str(address)}
        # One thread: a process that has several cannot be forked.
        single = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.ascend.prepared", str(address)],
            env={**environment, **single},
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
        try:
            yield environment
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def main(command: list[str]) -> int:
    """Runs the command; 0 if it was left out."""
    problem = prepare()
    if problem:
        print(f"Tests on the simulated NPU are left out: {problem}.", file=sys.stderr)
        return 1 if os.environ.get("CI") == "true" else 0
    with prepared() as environment:
        return subprocess.run(command, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
