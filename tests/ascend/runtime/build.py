"""Builds the libraries of CANN that torch_npu links, out of this folder: `python tests/ascend/runtime/build.py`.

What the simulated runtime implements is compiled against the headers of the wheel, so that a wrong signature does not
compile. Every other symbol that torch_npu wants becomes a function that returns 0. Nothing but the standard library is
needed, and g++ and nm.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

SOURCES = Path(__file__).parent
ROOT = SOURCES.parents[2]
_FOLDER = Path(os.environ.get("TESSERA_NPU_BUILD") or ROOT / "build")
WHEEL = _FOLDER / "npu" / "torch_npu"
LIBRARIES = _FOLDER / "npu_runtime"
_STAMP = LIBRARIES / "sources"

# The other libraries of CANN; all that they are asked for lies in libascendcl.so.
_EMPTY = ("hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel")
# Looked up when first called, so that no library lists them.
_LOOKED_UP = (
    "aclSetCompileopt",
    "aclrtCtxSetSysParamOpt",
    "aclrtDestroyStreamForce",
    "aclrtSetDeviceSatMode",
    "aclrtSetOpExecuteTimeOut",
    "aclrtSetOpWaitTimeout",
    "aclrtSetStreamAttribute",
    "aclrtSetStreamFailureMode",
    "aclrtSetStreamOverflowSwitch",
    "aclrtSetSysParamOpt",
    "HcclGroupEnd",
    "HcclGroupStart",
    "HcclSetConfig",
)
_COMPILE = ("g++", "-std=c++17", "-O1", "-fPIC", "-w")


def build() -> bool:
    """Builds unless what is there came from the same sources. Returns whether it built."""
    stamp = _fingerprint()
    if _STAMP.is_file() and _STAMP.read_text() == stamp:
        return False
    LIBRARIES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        _build(Path(folder))
    _STAMP.write_text(stamp)
    return True


def _fingerprint() -> str:
    digest = hashlib.sha256(str(WHEEL.resolve()).encode())
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in {".cpp", ".h", ".py"}:
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _build(folder: Path) -> None:
    objects = _compile(folder)
    implemented = set().union(*(_symbols("--defined-only", path) for path in objects))
    wanted = _wanted()
    acl = {name for name in wanted if re.match(r"(acl|Hccl|Msprof|rt[A-Z])", name)} | set(
        _LOOKED_UP
    )
    atb = {name for name in wanted if "3atb" in name}
    _link("ascendcl", _stubs(acl - implemented), *objects, "-lrt", "-lpthread")
    _link("atb", _stubs(atb))
    ascendcl = (LIBRARIES / "libascendcl.so", "-Wl,-rpath,$ORIGIN")
    for name in _EMPTY:
        _link(name, "", "-Wl,--no-as-needed", *ascendcl)


def _compile(folder: Path) -> list[Path]:
    headers = WHEEL / "include"
    includes = (headers, headers / "third_party/hccl/inc", headers / "third_party/acl/inc")
    running, objects = [], []
    for source in sorted(SOURCES.glob("*.cpp")):
        objects.append(folder / f"{source.stem}.o")
        flags = [flag for path in includes for flag in ("-I", path)]
        running.append(subprocess.Popen([*_COMPILE, *flags, "-c", source, "-o", objects[-1]]))
    failed = [process.wait() for process in running]
    if any(failed):
        raise SystemExit("the simulated runtime does not compile")
    return objects


def _wanted() -> set[str]:
    """What the libraries of the wheel import and do not define themselves."""
    names = ("libtorch_npu.so", "libtensorpipe.so", "libnpu_profiler.so", "libop_plugin_atb.so")
    libraries = [next(WHEEL.glob("_C*.so")), *(WHEEL / "lib" / name for name in names)]
    wanted = set().union(*(_symbols("--undefined-only", path) for path in libraries))
    return wanted.difference(*(_symbols("--defined-only", path) for path in libraries))


def _symbols(which: str, library: Path) -> set[str]:
    flags = ["-g"] if library.suffix == ".o" else ["-D"]
    command = ["nm", *flags, which, str(library)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return {line.split()[-1].split("@")[0] for line in lines}


def _stubs(names: Iterable[str]) -> str:
    functions = "\n".join(f"long {name}(void) {{ return 0; }}" for name in sorted(names))
    return f'extern "C" {{\n{functions}\n}}\n' if functions else ""


def _link(name: str, code: str, *inputs: str | Path) -> None:
    """Replaces the library in one step, so that a process that has the old one loaded keeps it."""
    path = LIBRARIES / f"lib{name}.so"
    fresh = path.with_suffix(".new")
    output = ("-shared", "-o", fresh, f"-Wl,-soname,{path.name}")
    command = [*_COMPILE, *output, "-x", "c++", "-", "-x", "none", *inputs]
    subprocess.run(command, input=code, check=True, text=True)
    fresh.replace(path)


if __name__ == "__main__":
    print("built" if build() else "up to date", LIBRARIES)
    sys.exit(0)
