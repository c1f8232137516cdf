"""Compiles the CPU kernels: `python shared/cpu_kernels/build.py [--all]`.

Once for each instruction set, so that an image runs on any machine; the file's name holds a hash of
the sources, so that an old one is never loaded. Without a compiler there are no kernels, and torch
does their work. Nothing but the standard library is needed here.
"""

import argparse
import contextlib
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent
_FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden",
    # Products and sums in one rounding, everywhere alike; no errno for square roots.
    "-ffp-contract=fast", "-fno-math-errno", "-Wno-psabi", "-Wno-ignored-attributes",
)  # fmt: skip


@dataclass(frozen=True)
class InstructionSet:
    """`needs`: names in /proc/cpuinfo; `flags`: what the compiler is told."""

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]


def _instruction_set(name: str, *extensions: str) -> InstructionSet:
    spelt = {"avx512_bf16": "avx512bf16", "avx512_vnni": "avx512vnni"}
    flags = tuple(f"-m{spelt.get(extension, extension)}" for extension in extensions)
    return InstructionSet(name, frozenset(extensions), flags)


_AVX512 = ("avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq")
# The best first.
INSTRUCTION_SETS = (
    _instruction_set("avx512_bf16", *_AVX512, "avx512_vnni", "avx512_bf16"),
    _instruction_set("avx512", *_AVX512),
    _instruction_set("avx2", "avx2", "fma"),
)


def best_instruction_set() -> InstructionSet | None:
    """What this machine has; None where there is nothing for it."""
    flags: set[str] = set()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                flags = set(line.partition(":")[2].split())
                break
    return next((known for known in INSTRUCTION_SETS if known.needs <= flags), None)


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
        command = [chosen, *_FLAGS, *known.flags, "-o", str(made), str(SOURCES / "kernels.cpp")]
        subprocess.run(command, check=True, capture_output=True, text=True)
        made.replace(target)  # whole or not at all: others may be waiting for it
    for outdated in set(folder.glob(f"tessera-{known.name}-*.so")) - {target}:
        outdated.unlink(missing_ok=True)  # who has it loaded keeps it
    return target


def _file_name(known: InstructionSet) -> str:
    content = hashlib.sha256(repr((_FLAGS, known.flags)).encode())
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


def main() -> None:
    """Compiles what this machine needs, or everything for an image that will run elsewhere."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="for every instruction set")
    parser.add_argument("--status", action="store_true", help="only say what there is")
    arguments = parser.parse_args()
    here = best_instruction_set()
    if here is None:
        print("none for this processor")
        return
    if arguments.status:
        print(f"{here.name}, {'compiled' if find(here) else 'to be compiled'}")
    elif compiler() is None:
        print("not compiled: there is no C++ compiler (install g++ or clang++)")
    else:
        for known in INSTRUCTION_SETS if arguments.all else (here,):
            print(find(known) or compile_library(known))


if __name__ == "__main__":
    main()
