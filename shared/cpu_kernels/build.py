"""Compiles the CPU kernels: `python shared/cpu_kernels/build.py [--all]`; `--self-test` tries them out.

Once for each instruction set, so that an image runs on any machine; the file's name holds a hash of
the sources, so that an old one is never loaded. Without a compiler there are no kernels, and torch
does their work. Nothing but the standard library is needed here.
"""

import argparse
import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent
_FLAGS = (
    "-std=c++17", "-O3", "-pthread", "-fvisibility=hidden",
    # Products and sums in one rounding, everywhere alike; no errno for square roots.
    "-ffp-contract=fast", "-fno-math-errno", "-Wno-psabi", "-Wno-ignored-attributes",
    # A vector wider than a register goes through memory: many times slower (gcc's warning).
    "-Werror=vector-operation-performance", "-Wno-unknown-warning-option",
)  # fmt: skip
_LIBRARY_FLAGS = ("-fPIC", "-shared")
# Of another machine: compiler, emulator, and the packages that have them.
_EMULATED = {
    "aarch64": ("aarch64-linux-gnu-g++", "qemu-aarch64-static", "g++-aarch64-linux-gnu qemu-user-static"),
}  # fmt: skip


@dataclass(frozen=True)
class InstructionSet:
    """`machine`: as `uname -m` says; `needs`: names in /proc/cpuinfo; `flags`: what the compiler is told."""

    name: str
    machine: str
    needs: frozenset[str]
    flags: tuple[str, ...]


def _x86(name: str, *extensions: str) -> InstructionSet:
    spelt = {"avx512_bf16": "avx512bf16", "avx512_vnni": "avx512vnni"}
    flags = tuple(f"-m{spelt.get(extension, extension)}" for extension in extensions)
    return InstructionSet(name, "x86_64", frozenset(extensions), flags)


_AVX512 = ("avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq")
# The best of each machine first.
INSTRUCTION_SETS = (
    _x86("avx512_bf16", *_AVX512, "avx512_vnni", "avx512_bf16"),
    _x86("avx512", *_AVX512),
    _x86("avx2", "avx2", "fma"),
    InstructionSet("neon", "aarch64", frozenset({"asimd"}), ("-march=armv8-a",)),
)


def runnable_instruction_sets() -> tuple[InstructionSet, ...]:
    """What this machine has, the best first."""
    flags = _processor_flags()
    return tuple(known for known in _of_this_machine() if known.needs <= flags)


def choose(asked: str) -> InstructionSet | None:
    """The set of that name, or with "" the best that this machine has; None for "none" and where there is
    none for it: then torch does the work. Raises ValueError for one that cannot run here."""
    runnable = runnable_instruction_sets()
    if asked == "none":
        return None
    if not asked:
        return next(iter(runnable), None)
    for known in runnable:
        if known.name == asked:
            return known
    is_known = any(asked == known.name for known in INSTRUCTION_SETS)
    problem = "this machine lacks these instructions" if is_known else "there is no such set"
    here = ", ".join([*(known.name for known in runnable), "none"])
    raise ValueError(f"CPU instructions {asked!r}: {problem}; it may be {here}")


def _of_this_machine() -> tuple[InstructionSet, ...]:
    machine = {"arm64": "aarch64", "AMD64": "x86_64"}.get(platform.machine(), platform.machine())
    return tuple(known for known in INSTRUCTION_SETS if known.machine == machine)


def _processor_flags() -> set[str]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, values = line.partition(":")
            if name.strip() in ("flags", "Features"):  # of x86, of Arm
                return set(values.split())
    return set()


def find(known: InstructionSet) -> Path | None:
    """The compiled library, if there is one of these sources."""
    name = _file_name(known)
    return next((folder / name for folder in _folders() if (folder / name).is_file()), None)


def compiler() -> str | None:
    """The C++ compiler on the path."""
    return next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)


def compile_library(known: InstructionSet) -> Path:
    """Compiles it, in some seconds. Raises OSError or CalledProcessError where that fails."""
    chosen = compiler()
    if chosen is None:
        raise FileNotFoundError("no C++ compiler: install g++ or clang++")
    folder = next((folder for folder in _folders() if _is_writable(folder)), None)
    if folder is None:
        raise PermissionError(f"cannot write to {' or '.join(map(str, _folders()))}")
    target = folder / _file_name(known)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / target.name
        flags = [*_FLAGS, *_LIBRARY_FLAGS, *known.flags]
        command = [chosen, *flags, "-o", str(made), str(SOURCES / "kernels.cpp")]
        subprocess.run(command, check=True, capture_output=True, text=True)
        made.replace(target)  # whole or not at all: others may be waiting for it
    for outdated in set(folder.glob(f"tessera-{known.name}-*.so")) - {target}:
        outdated.unlink(missing_ok=True)  # who has it loaded keeps it
    return target


def _file_name(known: InstructionSet) -> str:
    content = hashlib.sha256(repr((_FLAGS, _LIBRARY_FLAGS, known.flags)).encode())
    for source in sorted(SOURCES.glob("*.[ch]*")):
        if source.suffix in (".cpp", ".h"):
            content.update(source.read_bytes())
    return f"tessera-{known.name}-{content.hexdigest()[:16]}.so"


def _folders() -> list[Path]:
    return [SOURCES / "build", Path.home() / ".cache" / "tessera" / "cpu_kernels"]


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def self_test(known: InstructionSet) -> bool:
    """Tries every kernel against plain loops (`self_test/`), under an emulator if another machine has
    the instructions. False if one is wrong; what cannot be tried here is skipped, with a line."""
    tools = _tools(known)
    if isinstance(tools, str):
        print(f"{known.name}: skipped, {tools}")
        return True
    chosen, *emulator = tools
    print(f"{known.name}:", *emulator, flush=True)
    flags = [*_FLAGS, *known.flags, *(["-static"] if emulator else [])]
    sources = [str(SOURCES / name) for name in ("kernels.cpp", "self_test/main.cpp")]
    with tempfile.TemporaryDirectory() as scratch:
        made = str(Path(scratch) / "self_test")
        commands = ([chosen, *flags, "-o", made, *sources], [*emulator, made])
        return all(subprocess.run(command).returncode == 0 for command in commands)


def _tools(known: InstructionSet) -> list[str] | str:
    """The compiler, and the emulator if one is needed; or why the instructions cannot be tried here."""
    if known in runnable_instruction_sets():
        chosen = compiler()
        return [chosen] if chosen else "there is no C++ compiler: install g++ or clang++"
    if known in _of_this_machine():
        return "this processor lacks it"
    if known.machine not in _EMULATED:
        return f"it needs an {known.machine} machine"
    *tools, packages = _EMULATED[known.machine]
    return tools if all(map(shutil.which, tools)) else f"it needs apt-get install {packages}"


def main() -> None:
    """Compiles what this machine needs, or everything for an image that will run elsewhere."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="for every instruction set")
    parser.add_argument("--status", action="store_true", help="only say what there is")
    parser.add_argument(
        "--self-test", action="store_true", help="try them; with --all those of other machines, too"
    )
    arguments = parser.parse_args()
    if arguments.self_test:
        tried = INSTRUCTION_SETS if arguments.all else runnable_instruction_sets()[:1]
        wrong = [known.name for known in tried if not self_test(known)]
        sys.exit(f"wrong: {', '.join(wrong)}" if wrong else 0)
    sets = _of_this_machine() if arguments.all else runnable_instruction_sets()[:1]
    if not sets:
        print("none for this processor")
    elif arguments.status:
        print(status())
    elif compiler() is None:
        print("not compiled: there is no C++ compiler (install g++ or clang++)")
    else:
        for known in sets:
            print(find(known) or compile_library(known))


def status(asked: str = "") -> str:
    """What a process will use, in a line. Raises ValueError as `choose` does."""
    known = choose(asked)
    if known is None:
        return "torch alone, as asked" if asked else "torch alone: none for this processor"
    how = "compiled" if find(known) else "to be compiled"
    return f"{known.name}, {how}{', as asked' if asked else ''}"


if __name__ == "__main__":
    main()
