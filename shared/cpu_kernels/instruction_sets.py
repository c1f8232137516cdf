"""The instruction sets that the CPU kernels are compiled for, and which of them this machine's processor names.

Nothing but the standard library is needed here.
"""

import contextlib
import platform
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class InstructionSet:
    """`machine`: as `uname -m` says; `needs`: names in /proc/cpuinfo; `flags`: what the compiler is told; `portable`:
    whether it computes in the arithmetic that all portable sets have."""

    name: str
    machine: str
    needs: frozenset[str]
    flags: tuple[str, ...]
    portable: bool = False

    @property
    def label(self) -> str:
        """Tells it from the same set in the other arithmetic."""
        return f"portable_{self.name}" if self.portable else self.name

    @property
    def arithmetic(self) -> str:
        """What its bits depend on beside the version: those of two sets with equal ones are equal."""
        if self.portable:
            # The kernels' bits are those of other machines too; that the choice of tokens is, was shown of x86 alone.
            return f"portable-{self.machine}"
        # Reciprocals begin with an approximation that each maker has its own of (VRCP14PS).
        return f"{self.name}-{processor().vendor}" if "avx512f" in self.needs else self.name


# Beside a set's own flags: no instruction whose result differs between processors.
_PORTABLE_FLAGS = ("-DTESSERA_PORTABLE",)
# In portable arithmetic it would be the set avx512: its products of bfloat16 add up in an order of their own.
_NOT_PORTABLE = {"avx512_bf16": "avx512"}


def portable(known: InstructionSet) -> InstructionSet | None:
    """The set in portable arithmetic; None where another one stands for it."""
    if known.name in _NOT_PORTABLE:
        return None
    return replace(known, flags=(*known.flags, *_PORTABLE_FLAGS), portable=True)


def portable_name(name: str) -> str:
    """The set that computes in portable arithmetic where that one is asked for."""
    return _NOT_PORTABLE.get(name, name)


def _x86(name: str, *extensions: str) -> InstructionSet:
    spelt = {
        "avx512_bf16": "avx512bf16",
        "avx512_vnni": "avx512vnni",
        "amx_tile": "amx-tile",
        "amx_bf16": "amx-bf16",
        "amx_int8": "amx-int8",
        "3dnowprefetch": "prfchw",
    }
    flags = tuple(f"-m{spelt.get(extension, extension)}" for extension in extensions)
    return InstructionSet(name, "x86_64", frozenset(extensions), flags)


_AVX512 = ("avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq")
_AVX512_BF16 = (*_AVX512, "avx512_vnni", "avx512_bf16")
# Of each machine the better first, as Intel's processors have it.
INSTRUCTION_SETS = (
    _x86("amx", *_AVX512_BF16, "amx_tile", "amx_bf16", "amx_int8", "3dnowprefetch"),
    _x86("avx512", *_AVX512),
    _x86("avx512_bf16", *_AVX512_BF16),
    _x86("avx2", "avx2", "fma"),
    InstructionSet("neon", "aarch64", frozenset({"asimd"}), ("-march=armv8-a",)),
)


@dataclass(frozen=True)
class Processor:
    """The first of /proc/cpuinfo: the fields that tell processors apart, and what it can do by its own account."""

    vendor: str
    name: tuple[str, ...]
    flags: frozenset[str]


# What tells two processors apart, on x86 and on Arm; some are missing in some containers.
_NAMES = (
    "vendor_id", "cpu family", "model", "model name", "stepping", "microcode",
    "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision",
)  # fmt: skip


@lru_cache(maxsize=1)
def processor() -> Processor:
    """This machine's; empty where there is no /proc/cpuinfo."""
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in _CPU_INFO.read_text().split("\n\n")[0].splitlines():
            field, _, value = line.partition(":")
            fields[field.strip()] = value.strip()
    flags = fields.get("flags") or fields.get("Features") or ""  # of x86, of Arm
    name = tuple(fields.get(each, "") for each in _NAMES)
    return Processor(fields.get("vendor_id", ""), name, frozenset(flags.split()))


def of_this_architecture() -> tuple[InstructionSet, ...]:
    """What an image for machines of this kind carries, in the order of `INSTRUCTION_SETS`."""
    machine = {"arm64": "aarch64", "AMD64": "x86_64"}.get(platform.machine(), platform.machine())
    return tuple(known for known in INSTRUCTION_SETS if known.machine == machine)


def all_of_this_architecture() -> tuple[InstructionSet, ...]:
    """The same in both arithmetics: what images carry."""
    sets = of_this_architecture()
    return (*sets, *filter(None, map(portable, sets)))


def named_by_processor(*, in_portable: bool = False) -> tuple[InstructionSet, ...]:
    """What the processor claims to have, the better first by name: whether the system lets programs use it, and
    which is the fastest, `choice` finds out. in_portable: in portable arithmetic."""
    here = processor()
    found = [known for known in of_this_architecture() if known.needs <= here.flags]
    if here.vendor == "AuthenticAMD":
        # Zen multiplies bfloat16 twice as fast as float32; Intel's vectors do it at half the speed.
        found.sort(key=lambda known: known.name != "avx512_bf16")
    return tuple(filter(None, map(portable, found))) if in_portable else tuple(found)
