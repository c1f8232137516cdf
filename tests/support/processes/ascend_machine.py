"""A machine with Ascend NPUs as a folder: device files, an `npu-smi`, CANN, NNAL, and packages of Python."""

import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from services.launcher.ascend.host import COMPILER_MODULES, CONTROL_FILES, LIBRARIES, AscendHost
from shared.cpu_kernels import compiling

# As drivers 25.x print them, for an Atlas 800I A2 and for a 300I Duo with two chips on a card.
INFO_910B = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.2.0                   Version: 25.2.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 97.9        34                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3408 / 65536         |
+===========================+===============+====================================================+
| 1     910B3               | OK            | 92.3        32                0    / 0             |
| 0                         | 0000:81:00.0  | 0           0    / 0          3400 / 65536         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| No running processes found in NPU 0                                                            |
+===========================+===============+====================================================+
| No running processes found in NPU 1                                                            |
+===========================+===============+====================================================+
"""
HELD_910B = INFO_910B.replace("3408 / 65536", "41052/ 65536").replace(
    "| No running processes found in NPU 0                                                            |",
    "| 0       0                 | 1333928       | python3                  | 37709                   |\n"
    "| 0       0                 | 1333930       |                          | 132                     |",
)
INFO_310P = """\
+--------------------------------------------------------------------------------------------------------+
| npu-smi 25.5.1                                   Version: 25.5.1                                       |
+-------------------------------+-----------------+------------------------------------------------------+
| NPU     Name                  | Health          | Power(W)     Temp(C)           Hugepages-Usage(page) |
| Chip    Device                | Bus-Id          | AICore(%)    Memory-Usage(MB)                        |
+===============================+=================+======================================================+
| 32768   310P3                 | OK              | NA           49                8728  / 8728          |
| 0       0                     | 0000:01:00.0    | 0            19435/ 21527                            |
+-------------------------------+-----------------+------------------------------------------------------+
| 32768   310P3                 | Warning         | NA           45                0     / 0             |
| 1       1                     | 0000:01:00.0    | 0            1511 / 43693                            |
+===============================+=================+======================================================+
+-------------------------------+-----------------+------------------------------------------------------+
| NPU     Chip                  | Process id      | Process name             | Process memory(MB)        |
+===============================+=================+======================================================+
| 32768   0                     | 4711            | mindie                   | 17500                     |
+===============================+=================+======================================================+
"""
_BOARD = "\tNPU ID                         : 0\n\tFirmware Version               : 7.7.0.6.236\n"
_RUNTIME = """
#include <stdlib.h>
static int number(const char* name) { const char* text = getenv(name); return text ? atoi(text) : 0; }
int aclInit(const char* file) { return number("FAKE_STATUS"); }
int aclrtGetDeviceCount(unsigned* count) { *count = number("FAKE_DEVICES"); return 0; }
"""


@dataclass
class AscendMachine:
    """Two chips, CANN 9.0.0 and torch_npu 2.9.0.post2, all in order; tests take something away."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("davinci0", "davinci1", *CONTROL_FILES):
            self.write(f"/dev/{name}").chmod(0o666)
        self.npu_smi(INFO_910B)
        self.write("/usr/local/Ascend/ascend-toolkit/set_env.sh")
        self.write("/usr/local/Ascend/nnal/atb/set_env.sh")
        self.cann("9.0.0")
        self.package("torch", "2.9.0+cpu", "class npu:\n    device_count = lambda: 2")
        self.package("torch_npu", "2.9.0.post2", "__version__ = '2.9.0.post2'")
        for module in COMPILER_MODULES:
            self.write(f"/packages/{module}/__init__.py")
        self.environment |= {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(self.root / "packages"),
            "ASCEND_HOME_PATH": "/usr/local/Ascend/ascend-toolkit/latest",
            "ATB_HOME_PATH": "/usr/local/Ascend/nnal/atb/latest",
            "LD_LIBRARY_PATH": str(self.root / "lib"),
            "FAKE_DEVICES": "2",
        }
        compile_runtime(self.root / "lib")

    def host(self) -> AscendHost:
        """The machine as the code that is tested sees it."""
        return AscendHost(self.root, self.environment)

    def write(self, name: str, text: str = "") -> Path:
        """A file of the machine."""
        path = self.root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def npu_smi(self, info: str, status: int = 0) -> None:
        """The tool: it prints `info`, or the board."""
        script = f'#!/bin/sh\n[ "$2" = -t ] && cat <<"E" && exit\n{_BOARD}E\ncat <<"E"\n{info}E\nexit {status}\n'
        self.write("/usr/local/bin/npu-smi", script).chmod(0o755)

    def cann(self, version: str) -> None:
        """The toolkit's version."""
        home = "/usr/local/Ascend/ascend-toolkit/latest"
        text = f"package_name=Ascend-cann-toolkit\nversion={version}\narch=aarch64\n"
        self.write(f"{home}/aarch64-linux/ascend_toolkit_install.info", text)

    def package(self, name: str, version: str, code: str = "") -> None:
        """A package of Python."""
        if code:
            self.write(f"/packages/{name}/__init__.py", code)
        for old in (self.root / "packages").glob(f"{name}-*.dist-info/METADATA"):
            old.unlink()
            old.parent.rmdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        self.write(f"/packages/{name}-{version}.dist-info/METADATA", text)

    def without_library(self, name: str) -> None:
        """One of CANN's or NNAL's libraries is not found."""
        (self.root / "lib" / name).unlink()


def compile_runtime(folder: Path) -> None:
    """Libraries under the names of CANN's; they only count devices."""
    folder.mkdir(parents=True, exist_ok=True)
    first, *others = (folder / name for name in LIBRARIES)
    command = [str(compiling.compiler()), "-shared", "-fPIC", "-x", "c", "-", "-o", str(first)]
    subprocess.run(command, input=_RUNTIME, text=True, check=True)
    for other in others:
        other.write_bytes(first.read_bytes())
