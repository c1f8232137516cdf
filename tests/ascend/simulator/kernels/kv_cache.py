"""Writing keys and values into blocks of the cache."""

import torch
from torch import Tensor

from tests.ascend.simulator.dispatch import kernel
from tests.ascend.simulator.errors import require
from tests.ascend.simulator.kernels.layer import require_contiguous
from tests.ascend.simulator.personality import personality

NZ_WIDTH = 16


def is_nz(cache: Tensor) -> bool:
    """Whether a cache is `[blocks, heads * size / 16, block size, 16]`, the layout of 310P."""
    return personality().is_310p and cache.dim() == 4 and cache.shape[-1] == NZ_WIDTH


def _check(
    name: str, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    require_contiguous(name, key_cache=key_cache, value_cache=value_cache)
    require(
        key.dtype == value.dtype == key_cache.dtype == value_cache.dtype,
        f"{name}: {key.dtype}, {value.dtype} into caches of {key_cache.dtype}, {value_cache.dtype}",
    )
    require(
        key.dim() == 3 and value.dim() == 3,
        f"{name}: keys {list(key.shape)}, values {list(value.shape)}",
    )
    require(
        slots.dim() == 1 and len(slots) == len(key),
        f"{name}: {list(slots.shape)} slots, {len(key)} keys",
    )
    used = slots[slots >= 0]
    places = key_cache.shape[0] * (key_cache.shape[2] if is_nz(key_cache) else key_cache.shape[1])
    require(bool((used < places).all()), f"{name}: a slot out of range, there are {places}")
    require(len(used.unique()) == len(used), f"{name}: slots are not unique")


def _write(source: Tensor, cache: Tensor, slots: Tensor) -> None:
    if is_nz(cache):
        rows = source.reshape(len(source), -1, NZ_WIDTH)
        size = cache.shape[2]
        cache[slots // size, :, slots % size] = rows
    else:
        require(
            source.shape[1:] == cache.shape[2:],
            f"rows {list(source.shape)} into {list(cache.shape)}",
        )
        cache.view(-1, *cache.shape[2:])[slots] = source


@kernel("npu", "npu_scatter_pa_kv_cache")
def scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    compress_lens: Tensor | None = None,
    compress_seq_offsets: Tensor | None = None,
    seq_lens: Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    name = "npu_scatter_pa_kv_cache"
    require(
        cache_mode == "Norm",
        f"{name}: cache_mode {cache_mode!r} writes another layout than {key_cache.shape}",
    )
    require(
        compress_lens is None and compress_seq_offsets is None and seq_lens is None,
        f"{name}: not simulated",
    )
    require(
        slot_mapping.dtype in (torch.int32, torch.int64), f"{name}: slots of {slot_mapping.dtype}"
    )
    require_contiguous(name, key=key, value=value, slot_mapping=slot_mapping)
    require(bool((slot_mapping >= 0).all()), f"{name}: a negative slot")
    _check(name, key, value, key_cache, value_cache, slot_mapping)
    for source, cache in ((key, key_cache), (value, value_cache)):
        _write(source, cache, slot_mapping.long())


@kernel("atb", "_npu_reshape_and_cache")
def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor
) -> None:
    name = "_npu_reshape_and_cache"
    require(slot_indices.dtype == torch.int32, f"{name}: slots of {slot_indices.dtype}")
    _check(name, key, value, key_cache, value_cache, slot_indices)
    kept = slot_indices >= 0  # negative slots are skipped
    for source, cache in ((key, key_cache), (value, value_cache)):
        _write(source[kept], cache, slot_indices[kept].long())
