"""Every kernel against plain loops (`self_test/`), under an emulator if another machine has the instructions."""

import shutil
import subprocess
import tempfile
from pathlib import Path

from shared.cpu_kernels import compiling, instruction_sets
from shared.cpu_kernels.instruction_sets import InstructionSet

# Of another machine: compiler, emulator, and the packages that have them.
_EMULATED = {
    "aarch64": ("aarch64-linux-gnu-g++", "qemu-aarch64-static", "g++-aarch64-linux-gnu qemu-user-static"),
}  # fmt: skip


def self_test(known: InstructionSet) -> bool:
    """False if a kernel computes wrongly; what cannot be tried here is skipped, with a line."""
    tools = _tools(known)
    if isinstance(tools, str):
        print(f"{known.name}: skipped, {tools}")
        return True
    chosen, *emulator = tools
    print(f"{known.name}:", *emulator, flush=True)
    flags = [*compiling.FLAGS, *known.flags, *(["-static"] if emulator else [])]
    sources = [str(compiling.SOURCES / name) for name in ("kernels.cpp", "self_test/main.cpp")]
    with tempfile.TemporaryDirectory() as scratch:
        made = str(Path(scratch) / "self_test")
        commands = ([chosen, *flags, "-o", made, *sources], [*emulator, made])
        return all(subprocess.run(command).returncode == 0 for command in commands)


def _tools(known: InstructionSet) -> list[str] | str:
    """The compiler, and the emulator if one is needed; or why the instructions cannot be tried here."""
    if known in instruction_sets.named_by_processor():
        chosen = compiling.compiler()
        return [chosen] if chosen else compiling.NO_COMPILER
    if known in instruction_sets.of_this_architecture():
        return "this processor lacks it"
    if known.machine not in _EMULATED:
        return f"it needs an {known.machine} machine"
    *tools, packages = _EMULATED[known.machine]
    return tools if all(map(shutil.which, tools)) else f"it needs apt-get install {packages}"
