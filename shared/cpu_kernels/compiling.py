"""How the CPU kernels become libraries, one for each instruction set, and where those lie.

A file's name holds a hash of the sources, so that an old one is never loaded. Nothing but the standard library is
needed here.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shared.cpu_kernels.instruction_sets import InstructionSet

SOURCES = Path(__file__).parent / "source"
FLAGS = (
    "-std=c++17", "-O3", "-pthread", "-fvisibility=hidden",
    # Products and sums are rounded once where sources say so, nowhere else; no errno for square roots.
    "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi", "-Wno-ignored-attributes",
    # A vector wider than a register goes through memory: many times slower (gcc's warning).
    "-Werror=vector-operation-performance", "-Wno-unknown-warning-option",
)  # fmt: skip
COMPILERS = ("c++", "g++", "clang++")
NO_COMPILER = "there is no C++ compiler (install g++ or clang++)"
_LIBRARY_FLAGS = ("-fPIC", "-shared")


def find(known: InstructionSet) -> Path | None:
    """The compiled library, if there is one of these sources."""
    name = file_name(known)
    return next((folder / name for folder in folders() if (folder / name).is_file()), None)


def compiler() -> str | None:
    """The C++ compiler on the path."""
    return next((name for name in COMPILERS if shutil.which(name)), None)


def compile_library(known: InstructionSet) -> Path:
    """Compiles it, in some seconds. Raises OSError or CalledProcessError where that fails."""
    chosen = compiler()
    if chosen is None:
        raise FileNotFoundError(NO_COMPILER)
    folder = next((folder for folder in folders() if is_writable(folder)), None)
    if folder is None:
        raise PermissionError(f"cannot write to {' or '.join(map(str, folders()))}")
    target = folder / file_name(known)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / target.name
        flags = [*FLAGS, *_LIBRARY_FLAGS, *known.flags]
        command = [chosen, *flags, "-o", str(made), str(SOURCES / "kernels.cpp")]
        subprocess.run(command, check=True, capture_output=True, text=True)
        made.replace(target)  # whole or not at all: others may be waiting for it
    for outdated in set(folder.glob(f"tessera-{known.label}-*.so")) - {target}:
        outdated.unlink(missing_ok=True)  # who has it loaded keeps it
    return target


def compile_missing(sets: Iterable[InstructionSet]) -> dict[InstructionSet, Exception]:
    """Compiles those that there are no libraries of, as many at once as there are processors. Returns why some could
    not be compiled."""
    missing = [known for known in sets if find(known) is None]
    failed: dict[InstructionSet, Exception] = {}

    def attempt(known: InstructionSet) -> None:
        try:
            compile_library(known)
        except (OSError, subprocess.CalledProcessError) as error:
            failed[known] = error

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(attempt, missing))
    return failed


def reason(error: Exception) -> str:
    """Of `compile_library` in a line."""
    if isinstance(error, subprocess.CalledProcessError):
        said = [line for line in str(error.stderr).splitlines() if "error" in line]
        return f"it does not compile: {(said or str(error.stderr).splitlines() or [str(error)])[0].strip()}"
    return str(error)


def file_name(known: InstructionSet) -> str:
    """Of the library of these sources."""
    content = hashlib.sha256(repr((FLAGS, _LIBRARY_FLAGS, known.flags)).encode())
    for source in sorted(SOURCES.rglob("*.[ch]*")):
        if source.suffix in (".cpp", ".h") and source.parent.name != "self_test":
            content.update(source.read_bytes())
    return f"tessera-{known.label}-{content.hexdigest()[:16]}.so"


def folders() -> list[Path]:
    """Where libraries may lie, the first that can be written goes first."""
    return [Path(__file__).parent / "build", Path.home() / ".cache" / "tessera" / "cpu_kernels"]


def is_writable(folder: Path) -> bool:
    """Whether files can be made there; makes the folder if need be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)
