"""How much memory each kind of cache has: state of every slot first, then keys of media, blocks from what is left."""

from shared.errors import InvalidRequest


def kv_bytes(asked: int, budget: int, most_useful: int) -> int:
    """Bytes for the cache: what was asked for, or what the device allows (`Device.cache_budget`).

    `most_useful`: what every slot at its longest would fill.
    """
    return asked or min(budget, most_useful)


def less_state(total_bytes: int, state_bytes: int, max_slots: int, budget: str = "") -> int:
    """Bytes that are left for blocks. Raises InvalidRequest if the state of all slots does not fit. budget: how
    `total_bytes` came about, for that."""
    if total_bytes < state_bytes:
        raise InvalidRequest(
            "KV_CACHE_TOO_SMALL",
            f"the state of {max_slots} sequences takes {state_bytes} bytes, but the cache has {total_bytes}: lower"
            f" --max-num-seqs or raise --kv-cache-memory-bytes{budget and f' ({budget})'}",
            field="max_num_seqs",
        )
    return total_bytes - state_bytes


def count_encoder_blocks(
    total_bytes: int,
    least_bytes: int,
    block_bytes: int,
    item_blocks: int,
    max_slots: int,
    budget: str = "",
) -> int:
    """Blocks for the keys of media: half of the bytes at most, without the `least_bytes` that the longest sequence
    needs beside, no more than one item for each slot, and at least one item. Raises InvalidRequest if that does not
    fit. budget: how `total_bytes` came about, for that."""
    spare = max(0, min(total_bytes // 2, total_bytes - least_bytes) // block_bytes - 1)
    blocks = max(item_blocks, min(spare, max_slots * item_blocks))
    if (blocks + 1) * block_bytes > total_bytes:  # block 0 is padding
        raise InvalidRequest(
            "KV_CACHE_TOO_SMALL",
            f"the keys of one image take {blocks * block_bytes} bytes, but the cache has {total_bytes}: raise"
            f" --kv-cache-memory-bytes{budget and f' ({budget})'}",
            field="kv_cache_memory_bytes",
        )
    return blocks


def count_blocks(
    total_bytes: int, block_bytes: int, max_model_len: int, block_size: int, budget: str = ""
) -> int:
    """Blocks that fit. Raises InvalidRequest if one sequence of `max_model_len` would not. budget: how `total_bytes`
    came about, for that."""
    blocks = total_bytes // block_bytes
    needed = -(-max_model_len // block_size) + 1  # block 0 is padding
    if blocks < needed:
        raise InvalidRequest(
            "KV_CACHE_TOO_SMALL",
            f"a cache of {total_bytes} bytes holds {blocks} blocks, but one sequence of"
            f" --max-model-len {max_model_len} needs {needed} ({needed * block_bytes} bytes):"
            f" raise --kv-cache-memory-bytes or lower --max-model-len{budget and f' ({budget})'}",
            field="kv_cache_memory_bytes",
        )
    return blocks


def count_host_blocks(asked: int | None, num_blocks: int, allowed: int, block_bytes: int) -> int:
    """Blocks in host memory: what was asked for, or as many as the cache has, in `allowed` bytes at most."""
    return min(num_blocks - 1, allowed // block_bytes) if asked is None else asked


def require_no_swapping(asked: int | None) -> None:
    """Raises InvalidRequest where blocks in host memory are asked for, of a model whose sequences are more than their
    blocks."""
    if asked:
        raise InvalidRequest(
            "UNSUPPORTED_SWAPPING",
            f"--num-host-blocks {asked}: layers of this model keep state outside the cache's blocks, so its sequences"
            " are not swapped out but computed again; leave the flag away",
            field="num_host_blocks",
        )
