"""How much memory of the host a process may take."""

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60


def available_bytes() -> int:
    """What could be taken now: neither the host nor our control group denies it."""
    return min(_proc_bytes("/proc/meminfo", "MemAvailable"), _group_bytes(_CGROUP))


def total_bytes() -> int:
    """All memory of the host."""
    return _proc_bytes("/proc/meminfo", "MemTotal")


def resident_bytes() -> int:
    """What this process has now."""
    return _proc_bytes("/proc/self/status", "VmRSS")


def peak_resident_bytes() -> int:
    """The most that this process has had since the mark was last reset; 0 where the system does not say."""
    return _proc_bytes("/proc/self/status", "VmHWM", missing=0)


def _proc_bytes(path: str, name: str, missing: int = _UNLIMITED) -> int:
    for line in Path(path).read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return missing


def _group_bytes(folder: Path) -> int:
    """What the control group (version 2) leaves, page cache that can be dropped counted as free."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        stat = (folder / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return _UNLIMITED
    if limit == "max":
        return _UNLIMITED
    cache = sum(int(line.split()[1]) for line in stat if line.startswith("inactive_file "))
    return max(0, int(limit) - used + cache)
