"""How much memory a step takes, and how much the cache may take."""

import contextlib
import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

from shared.errors import InvalidRequest

_MOST_BYTES = 4 << 30
_MOST_BYTES_SMALL = 512 << 20  # a hundred thousand tokens of a model that small
_CUDA_SHARE = 0.9
_HOST_SHARE = 0.4
_SWAP_SHARE = 0.1  # of the host memory that is free
_MOST_PINNED_BYTES = 4 << 30
_CGROUP = Path("/sys/fs/cgroup")
_CLEAR = Path("/proc/self/clear_refs")
_UNLIMITED = 1 << 60


def cache_budget(
    device: torch.device, share: float | None, sharers: int, activation_bytes: int
) -> int:
    """Bytes that the caches of one of `sharers` decoders may take, once the weights are loaded.

    CUDA: `share` of the device's memory (0.9 unless given), less what is taken and what a step
    needs. CPU: `share` of what is free (0.4 unless given; the rest is for other rooms), where
    neither the host nor our control group denies it, less what a step needs.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        taken = torch.cuda.memory_reserved(device) if sharers > 1 else total - free
        allowed = int(total * (share or _CUDA_SHARE) / sharers) - taken
    else:
        allowed = int(available_bytes() * (share or _HOST_SHARE) / sharers)
    return max(0, allowed - activation_bytes)


def available_bytes() -> int:
    """Host memory that could be taken now."""
    return min(_host_bytes(), _group_bytes(_CGROUP))


def kv_bytes(asked: int, budget: int, most_useful: int, small: bool) -> int:
    """Bytes for the cache: what was asked for, or what the budget and good sense allow.

    `most_useful`: what every slot at its longest would fill. `small`: the model is.
    """
    most = _MOST_BYTES_SMALL if small else _MOST_BYTES
    return asked or min(most, budget, most_useful)


def swap_blocks(
    asked: int | None, device: torch.device, sharers: int, num_blocks: int, block_bytes: int
) -> int:
    """Blocks in host memory: what was asked for, or as many as the cache's, as far as good sense allows.

    On the CPU they cost nothing before they are used. For CUDA the memory is pinned from the start.
    """
    if asked is not None:
        return asked
    allowed = int(available_bytes() * _SWAP_SHARE / sharers)
    if device.type == "cuda":
        allowed = min(allowed, _MOST_PINNED_BYTES)
    return min(num_blocks - 1, allowed // block_bytes)


def peak_bytes(run: Callable[[], None], device: torch.device) -> int:
    """How much more memory than now `run` takes at its highest; 0 where nobody can tell."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device)) - before
    with contextlib.suppress(AttributeError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before would be used again unseen
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5")  # the highest mark is that of now: proc(5)
    before = _status_bytes("VmRSS")
    run()
    return max(0, _status_bytes("VmHWM") - before)


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


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0
