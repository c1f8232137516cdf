"""The machine as files, environment and programs, so that tests can give another one."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from shared.settings import VISIBLE_NPUS, child_environment

# Beside /dev/davinci<number>, one for each chip.
CONTROL_FILES = ("davinci_manager", "devmm_svm", "hisi_hdc")
_NPU_SMI = ("usr/local/bin/npu-smi", "usr/local/sbin/npu-smi", "usr/bin/npu-smi")
_PROBE_S = 30.0
_NPU_SMI_S = 20.0
# torch_npu is linked with these; the last one belongs to NNAL and is loaded at the first operation that needs it.
LIBRARIES = (
    "libascendcl.so",
    "libhccl.so",
    "libge_runner.so",
    "libacl_op_compiler.so",
    "libatb.so",
)
# What CANN's compiler of operators imports, as modules; the extra `npu` has them all.
COMPILER_MODULES = ("absl", "attr", "cffi", "decorator", "psutil", "scipy", "sympy", "yaml")
# In a process of its own: the libraries print, start threads, and end a process whose driver is broken.
_PROBE = """
import ctypes, importlib.metadata, importlib.util, json, sys
def version(name):
    try:
        return importlib.metadata.version(name) if importlib.util.find_spec(name) else ""
    except importlib.metadata.PackageNotFoundError:
        return ""
def load(name):
    try:
        return ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        errors[name] = str(error)
errors, status, count = {}, -1, ctypes.c_uint32()
names, modules = (argument.split() for argument in sys.argv[1:])
libraries = [load(name) for name in names]
if libraries[0]:
    status = libraries[0].aclInit(None) or libraries[0].aclrtGetDeviceCount(ctypes.byref(count))
print(json.dumps({"torch": version("torch"), "torch_npu": version("torch_npu"), "numpy": version("numpy"),
                  "lacks": [name for name in modules if not importlib.util.find_spec(name)],
                  "errors": errors, "status": status, "devices": count.value}))
"""


@dataclass(frozen=True)
class Probe:
    """What a fresh process can load and count, without importing torch."""

    torch: str = ""  # version; empty if it is not installed
    torch_npu: str = ""
    numpy: str = ""
    lacks: Sequence[str] = ()  # of COMPILER_MODULES
    errors: Mapping[str, str] = field(default_factory=dict)  # library -> why it cannot be loaded
    status: int = -1  # of the runtime's start and count; -1 if there is no runtime
    devices: int = 0


@dataclass(frozen=True)
class AscendHost:
    """Paths are those of the machine and looked for below `root`."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=child_environment)

    def path(self, name: str) -> Path:
        """A file of the machine, such as "/usr/local/Ascend"."""
        return self.root / name.lstrip("/")

    def chips(self) -> list[Path]:
        """/dev/davinci0 and so on, by number."""
        found = self.path("/dev").glob("davinci[0-9]*")
        return sorted(found, key=lambda path: int(path.name.removeprefix("davinci")))

    def visible(self) -> list[int] | None:
        """The numbers in ASCEND_RT_VISIBLE_DEVICES; None if all devices are visible."""
        given = self.environment.get(VISIBLE_NPUS)
        return None if given is None else [int(number) for number in re.findall(r"\d+", given)]

    def usable(self) -> list[int]:
        """The numbers, as ASCEND_RT_VISIBLE_DEVICES takes them, of the devices that CANN's runtime sees."""
        counted = list(range(self.probe.devices))
        return (self.visible() or counted)[: len(counted)]

    def npu_smi(self, *arguments: str) -> subprocess.CompletedProcess[str] | None:
        """What `npu-smi` says; None if it is not there or does not answer."""
        tool = next((path for name in _NPU_SMI if (path := self.path(name)).is_file()), None)
        if tool is None:
            return None
        try:
            return subprocess.run(
                [str(tool), *arguments],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_NPU_SMI_S,
                check=False,
            )
        except (OSError, subprocess.SubprocessError):
            return None

    @cached_property
    def probe(self) -> Probe:
        """What a process with this environment can load; nothing if that process crashes."""
        done = self.python(_PROBE, " ".join(LIBRARIES), " ".join(COMPILER_MODULES))
        lines = done.stdout.splitlines() if done else []
        said = [line for line in lines if line.startswith("{")]  # libraries print lines too
        return Probe(**json.loads(said[-1])) if said else Probe()

    def python(
        self, program: str, *arguments: str, within_s: float = _PROBE_S
    ) -> subprocess.CompletedProcess[str] | None:
        """Runs Python code in this environment; None if it does not end in time."""
        try:
            return subprocess.run(
                [sys.executable, "-P", "-c", program, *arguments],
                env={**self.environment, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
                capture_output=True,
                text=True,
                errors="replace",
                timeout=within_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None
