"""What this machine computes with, read from the system's own files and tools.

Nothing here imports torch or torch_npu: that takes seconds, and fails with a broken driver.
"""

import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from services.launcher.ascend.host import AscendHost
from services.launcher.doctor import ascend_diagnosis
from shared.cpu_kernels import choice
from shared.errors import InvalidRequest
from shared.hardware import processors
from shared.hardware.devices import resolve_device
from shared.settings import cpu_arithmetic_is_portable, cpu_instructions, cpu_trial_folder

# The instruction sets that decide how fast matrix products are here.
_INTERESTING = (
    "avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8",
    "asimd", "asimddp", "bf16", "i8mm", "sve",
)  # fmt: skip


def describe() -> Iterator[tuple[str, str]]:
    """(what, found), such as ("memory", "23.4 GiB, 22.0 GiB free")."""
    yield "cpu", _cpu()
    yield "memory", _memory()
    yield "cuda", _cuda()
    yield "npu", _npu()


def require_instructions() -> None:
    """Raises InvalidRequest if TESSERA_CPU_INSTRUCTIONS names what cannot run here."""
    asked = cpu_instructions()
    try:
        if asked:
            portable = cpu_arithmetic_is_portable()
            choice.choose(asked, cpu_trial_folder(), may_compile=False, portable=portable)
    except ValueError as error:
        raise InvalidRequest("UNSUPPORTED_INSTRUCTIONS", str(error)) from None


def require_device(name: str) -> list[int]:
    """The NPUs that are to compute; none where that is another device. Raises InvalidRequest for one that this machine
    does not have, for an NPU with cause and remedy.
    """
    host = AscendHost()
    if name == "npu":
        ascend_diagnosis.require_usable(host)
    return host.usable() if resolve_device(name) == "npu" else []


def processor() -> str:
    """Model, and the instruction set that CPU kernels use here, for reports of measurements."""
    model = _cpu_info(Path("/proc/cpuinfo")).get("model name") or platform.machine()
    try:
        portable = cpu_arithmetic_is_portable()
        chosen = choice.choose(
            cpu_instructions(), cpu_trial_folder(), may_compile=False, portable=portable
        )
    except ValueError as error:
        return f"{model}, {error}"
    return f"{model}, {chosen.sets[0].label if chosen.sets else 'torch alone'}"


def _cpu() -> str:
    info = _cpu_info(Path("/proc/cpuinfo"))
    model = info.get("model name") or platform.processor() or platform.machine()
    flags = set((info.get("flags") or info.get("Features") or "").split())
    known = " ".join(name for name in _INTERESTING if name in flags) or "no vector extensions known"
    return f"{model}, {processors.find()}, {known}"


def _cpu_info(path: Path) -> dict[str, str]:
    """The fields of the first processor in /proc/cpuinfo."""
    try:
        first = path.read_text().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _memory() -> str:
    # Imported where it is needed: it takes 25 ms, and `serve` does not need it.
    import psutil

    memory = psutil.virtual_memory()
    gib = 1 << 30
    return f"{memory.total / gib:.1f} GiB, {memory.available / gib:.1f} GiB free"


def _cuda() -> str:
    names = _output("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")
    return "; ".join(names.splitlines()) or "none"


def _npu() -> str:
    return ", ".join(chip.name for chip in AscendHost().chips()) or "none"


def _output(*command: str) -> str:
    """What a tool prints; empty if it is not there or fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        return subprocess.check_output(command, text=True, timeout=10, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return ""
