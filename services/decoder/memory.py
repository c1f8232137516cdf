"""How much memory the cache may take."""

from pathlib import Path

import torch

from shared.errors import InvalidRequest

_MOST_BYTES = 4 << 30
_MOST_BYTES_SMALL = 512 << 20  # a hundred thousand tokens of a model that small
_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60


def available_bytes(device: torch.device) -> int:
    """Free memory of the device; of the CPU what neither the host nor our control group denies."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(_host_bytes(), _group_bytes(_CGROUP))


def kv_bytes(asked: int, available: int, share: float, most_useful: int, small: bool) -> int:
    """Bytes for the cache: what was asked for, or at most `share` of what is available.

    `most_useful`: what every slot at its longest would fill. `small`: the model is.
    """
    most = _MOST_BYTES_SMALL if small else _MOST_BYTES
    return asked or min(most, int(available * share), most_useful)


def count_blocks(total_bytes: int, block_bytes: int, max_model_len: int, block_size: int) -> int:
    """Blocks that fit. Raises InvalidRequest if one sequence of `max_model_len` would not."""
    blocks = total_bytes // block_bytes
    needed = -(-max_model_len // block_size) + 1  # block 0 is padding
    if blocks < needed:
        raise InvalidRequest(
            "KV_CACHE_TOO_SMALL",
            f"a cache of {total_bytes} bytes holds {blocks} blocks, but one sequence of"
            f" --max-model-len {max_model_len} needs {needed} ({needed * block_bytes} bytes):"
            " raise --kv-cache-memory-bytes or lower --max-model-len",
            field="kv_cache_memory_bytes",
        )
    return blocks


def _host_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _UNLIMITED


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
