"""Every kernel against plain loops (`self_test/`), under an emulator if another machine has the instructions.

What tiles of AMX compute is compared on every machine with AVX-512, with tiles in plain C++
(`self_test/emulated_tiles.h`).
"""

import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from shared.cpu_kernels import compiling, instruction_sets
from shared.cpu_kernels.instruction_sets import INSTRUCTION_SETS, InstructionSet

# Of another machine: compiler, emulator, and the packages that have them.
_EMULATED = {
    "aarch64": ("aarch64-linux-gnu-g++", "qemu-aarch64-static", "g++-aarch64-linux-gnu qemu-user-static"),
}  # fmt: skip


def with_emulated_tiles() -> InstructionSet:
    """The vectors of an AVX-512 set and tiles in plain C++ (`self_test/emulated_tiles.h`): what AMX machines compute,
    for those that lack it. A library of it is refused wherever it would serve."""
    vectors = [known for known in INSTRUCTION_SETS if known.name in ("avx512_bf16", "avx512")]
    here = instruction_sets.named_by_processor()
    base = next((known for known in vectors if known in here), vectors[0])
    return replace(base, name="amx_emulated", flags=(*base.flags, "-DTESSERA_EMULATED_TILES"))


def wrong_sets(sets: Iterable[InstructionSet]) -> list[str]:
    """Those whose kernels compute wrongly, and those in portable arithmetic that give other bits than the first of
    these; what cannot be tried here is skipped, with a line."""
    wrong, digests = [], {}
    for known in sets:
        right, digest = _try(known)
        if digest:
            digests[known.label] = digest
        if not right or digest not in ("", next(iter(digests.values()), "")):
            wrong.append(known.label)
    return wrong


def _try(known: InstructionSet) -> tuple[bool, str]:
    """Whether every kernel computes rightly, and in portable arithmetic what the results are, as a digest."""
    tools = _tools(known)
    if isinstance(tools, str):
        print(f"{known.label}: skipped, {tools}")
        return True, ""
    chosen, *emulator = tools
    print(f"{known.label}:", *emulator, flush=True)
    flags = [*compiling.FLAGS, *known.flags, *(["-static"] if emulator else [])]
    sources = [str(compiling.SOURCES / name) for name in ("kernels.cpp", "self_test/main.cpp")]
    # An emulator takes minutes for what its set has shown in the other arithmetic.
    alone = ["digests"] if emulator and known.portable else []
    digest = ""
    with tempfile.TemporaryDirectory() as scratch:
        made = str(Path(scratch) / "self_test")
        if subprocess.run([chosen, *flags, "-o", made, *sources]).returncode:
            return False, ""
        with subprocess.Popen([*emulator, made, *alone], stdout=subprocess.PIPE, text=True) as run:
            for line in run.stdout or ():
                print(line, end="", flush=True)
                digest = line.strip() if line.startswith("digests ") else digest
    return run.returncode == 0 and bool(digest) == known.portable, digest


def _tools(known: InstructionSet) -> list[str] | str:
    """The compiler, and the emulator if one is needed; or why the instructions cannot be tried here."""
    if known.machine in {here.machine for here in instruction_sets.of_this_architecture()}:
        if not known.needs <= instruction_sets.processor().flags:
            return "this processor lacks it"
        chosen = compiling.compiler()
        return [chosen] if chosen else compiling.NO_COMPILER
    if known.machine not in _EMULATED:
        return f"it needs an {known.machine} machine"
    *tools, packages = _EMULATED[known.machine]
    return tools if all(map(shutil.which, tools)) else f"it needs apt-get install {packages}"
