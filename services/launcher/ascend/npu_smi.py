"""What `npu-smi info` prints, as data.

A chip is two lines (910B: `| 0  910B3  | OK | ... |` and `| 0 | 0000:C1:00.0 | ... 3408 / 65536 |`); 310P and A3 have a
device number in the second one, and 310P has no HBM there but memory. Processes follow in a table of their own.
"""

import re
from dataclasses import dataclass

_RELEASE = re.compile(r"^\|\s*npu-smi\s+(\S+)\s+Version:\s*(\S+)", re.MULTILINE)
_FIRMWARE = re.compile(r"^\s*Firmware Version\s*:\s*(\S+)", re.MULTILINE)
# A number and a name that has a letter | health
_NPU = re.compile(r"^\|\s*(\d+)\s+(?=\S*[A-Za-z])(\S+)\s*\|\s*(\S+)\s*\|")
# A chip's number | bus | the rest
_CHIP = re.compile(r"^\|\s*(\d+)(?:\s+\d+)?\s*\|\s*(?:[0-9A-Fa-f]{4}:[0-9A-Fa-f:.]+|NA)\s*\|(.*)\|")
_MEMORY = re.compile(r"(\d+)\s*/\s*(\d+)")
# NPU and chip | process | name | MB
_PROCESS = re.compile(r"^\|\s*(\d+)\s+(\d+)\s*\|\s*(\d+)\s*\|\s*(.*?)\s*\|\s*(\d+)\s*\|")


@dataclass(frozen=True)
class Holder:
    """A process with memory of a chip."""

    pid: int
    name: str  # often empty
    megabytes: int


@dataclass(frozen=True)
class Chip:
    """One device: a card has one or two."""

    npu: int
    number: int  # within its card
    name: str
    health: str
    used_mb: int
    total_mb: int
    holders: tuple[Holder, ...] = ()


@dataclass(frozen=True)
class NpuSmi:
    """The driver's version and its chips, in the order in which the runtime counts them."""

    driver: str
    chips: tuple[Chip, ...]


def read(output: str) -> NpuSmi | None:
    """None if this is no output of `npu-smi info`."""
    release = _RELEASE.search(output)
    if release is None:
        return None
    holders: dict[tuple[int, int], list[Holder]] = {}
    rows: list[tuple[int, str, str, int, int, int]] = []
    npu: tuple[int, str, str] | None = None
    for line in output.splitlines():
        if found := _NPU.match(line):
            npu = int(found[1]), found[2], found[3]
        elif npu and (found := _CHIP.match(line)):
            rows.append((*npu, int(found[1]), *_memory(found[2])))
            npu = None
        elif found := _PROCESS.match(line):
            key = int(found[1]), int(found[2])
            holders.setdefault(key, []).append(Holder(int(found[3]), found[4], int(found[5])))
    chips = tuple(
        Chip(card, number, name, health, used, total, tuple(holders.get((card, number), ())))
        for card, name, health, number, used, total in rows
    )
    return NpuSmi(release[2], chips)


def firmware(output: str) -> str:
    """The version in what `npu-smi info -t board -i 0` prints; empty if it has none."""
    found = _FIRMWARE.search(output)
    return found[1] if found else ""


def _memory(columns: str) -> tuple[int, int]:
    """(used, total) in MB: HBM, the last pair, unless it is 0 of 0."""
    pairs = [(int(used), int(total)) for used, total in _MEMORY.findall(columns)]
    return next(((used, total) for used, total in reversed(pairs) if total), (0, 0))
