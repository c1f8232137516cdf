"""Every kernel against plain loops (`self_test/`), under an emulator if another machine has the instructions.

What tiles of AMX compute is compared on every machine with AVX-512, with tiles in plain C++
(`self_test/emulated_tiles.h`).
"""

import os
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
# Where compilers contract, they do it elsewhere at another level; kernels must not let them.
_OTHER_LEVEL = "-O1"


def with_emulated_tiles() -> InstructionSet:
    """The vectors of an AVX-512 set and tiles in plain C++ (`self_test/emulated_tiles.h`): what AMX machines compute,
    for those that lack it. A library of it is refused wherever it would serve."""
    vectors = [known for known in INSTRUCTION_SETS if known.name in ("avx512_bf16", "avx512")]
    here = instruction_sets.named_by_processor()
    base = next((known for known in vectors if known in here), vectors[0])
    return replace(base, name="amx_emulated", flags=(*base.flags, "-DTESSERA_EMULATED_TILES"))


def wrong_sets(sets: Iterable[InstructionSet]) -> list[str]:
    """Those whose kernels compute wrongly or give other bits when compiled otherwise, and those in portable arithmetic
    that give other bits than the first of these; what cannot be tried here is skipped, with a line."""
    wrong, in_portable = [], []
    for known in sets:
        tools = _tools(known)
        if isinstance(tools, str):
            print(f"{known.label}: skipped, {tools}")
            continue
        digests = _digests(known, *tools)
        right = all(digests) and len(set(digests)) == 1
        if right and known.portable:
            in_portable.append(digests[0])
            right = digests[0] == in_portable[0]
        if not right:
            wrong.append(known.label)
    return wrong


def _digests(known: InstructionSet, chosen: str, *emulator: str) -> list[str]:
    """Of the results: as compiled for use, then, without an emulator, otherwise. Empty where something fails."""
    # An emulator takes minutes for what its set has shown in the other arithmetic.
    first = _try(known, [chosen], emulator, digests_alone=bool(emulator) and known.portable)
    if emulator:
        return [first]
    others = [[chosen, _OTHER_LEVEL], *([name] for name in _other_compilers(chosen))]
    return [first, *(_try(known, other, (), digests_alone=True) for other in others)]


def _try(
    known: InstructionSet, compiler: list[str], emulator: tuple[str, ...], *, digests_alone: bool
) -> str:
    """The digests of what the kernels compute, empty if something is wrong."""
    print(f"{known.label}:", *compiler, *emulator, flush=True)
    chosen, *more = compiler
    flags = [*compiling.FLAGS, *known.flags, *more, *(["-static"] if emulator else [])]
    sources = [str(compiling.SOURCES / name) for name in ("kernels.cpp", "self_test/main.cpp")]
    digests = ""
    with tempfile.TemporaryDirectory() as scratch:
        made = str(Path(scratch) / "self_test")
        if subprocess.run([chosen, *flags, "-o", made, *sources]).returncode:
            return ""
        command = [*emulator, made, *(["digests"] if digests_alone else [])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
            for line in run.stdout or ():
                print(line, end="", flush=True)
                digests = line.strip() if line.startswith("digests ") else digests
    return digests if run.returncode == 0 else ""


def _other_compilers(chosen: str) -> list[str]:
    """Those on the path that are not the chosen one by another name."""
    found = {
        os.path.realpath(path): name for name in compiling.COMPILERS if (path := shutil.which(name))
    }
    return [
        name for path, name in found.items() if path != os.path.realpath(shutil.which(chosen) or "")
    ]


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
