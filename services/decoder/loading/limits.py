"""What a worker can hold: memory is divided among the kinds of cache here."""

import structlog

from services.decoder.devices.base.device import Device
from services.decoder.loading.memory import (
    count_blocks,
    count_encoder_blocks,
    count_host_blocks,
    kv_bytes,
    less_state,
    require_no_swapping,
)
from services.decoder.loading.step_size import StepSize
from services.decoder.models.cache_spec import CacheSpec
from services.decoder.settings import DecoderSettings
from services.decoder.worker.plans.plan import Limits

log = structlog.get_logger(__name__)


def find_limits(
    settings: DecoderSettings,
    spec: CacheSpec,
    device: Device,
    longest: int,
    steps: StepSize,
    step_bytes: int,
    graphs: int,
    adapters: int = 0,
) -> Limits:
    """Of a worker on this device, whose largest step takes `step_bytes`, whose graphs `graphs`, and whose adapters that
    are loaded later `adapters` at most. Waits for the other ranks, where there are any. Raises InvalidRequest for a
    model whose caches do not fit."""
    block_size, ops, slots = device.block_size, device.ops, settings.max_num_seqs
    host_sharers = settings.memory_sharers * ops.share.size
    sharers = host_sharers if device.is_host else settings.memory_sharers
    block_bytes, state_bytes = spec.block_bytes(ops), spec.state_bytes(slots)
    useful = slots * -(-longest // block_size) + 1
    budget = device.cache_budget(
        settings.gpu_memory_utilization, sharers, step_bytes, settings.npu_reserved_memory
    )
    budget = budget.less("graphs (--graphs)", graphs).less("adapters (--max-loras)", adapters)
    asked = settings.kv_cache_memory_bytes or 0
    reason = "" if asked else str(budget)
    if asked > budget.left:
        log.warning(
            "the cache that was asked for may not fit beside what else takes memory",
            asked=asked,
            budget=str(budget),
        )
    most_useful = state_bytes + useful * block_bytes + spec.most_encoder_bytes(ops, slots)
    total = kv_bytes(asked, budget.nbytes, most_useful)
    swap = device.swap_bytes(host_sharers)
    if not spec.is_paged_alone:
        require_no_swapping(settings.num_host_blocks)
        swap = 0
    if spec.states:
        total = less_state(total, state_bytes, slots, reason)
        reason = (
            f"{reason or total + state_bytes}, less {state_bytes} bytes of state (--max-num-seqs)"
        )
    encoder_blocks = encoder_bytes = 0
    if spec.encoder:
        least = (-(-longest // block_size) + 1) * block_bytes
        of_item = -(-spec.item_rows // block_size)
        each = spec.encoder_block_bytes(ops)
        encoder_blocks = count_encoder_blocks(total, least, each, of_item, slots, reason)
        encoder_bytes = (encoder_blocks + 1) * each
        total -= encoder_bytes
        reason = f"{reason or total + encoder_bytes}, less {encoder_bytes} bytes for keys of media"
    if block_bytes:
        if ops.ranks is not None:  # every rank has all sequences
            fewest = ops.ranks.least(total // block_bytes, swap // block_bytes)
            total, swap = (blocks * block_bytes for blocks in fewest)
        blocks = count_blocks(total, block_bytes, longest, block_size, reason)
        host_blocks = count_host_blocks(settings.num_host_blocks, blocks, swap, block_bytes)
    else:
        # They take no memory, and the scheduler never lacks one.
        blocks, host_blocks = useful, 0
    held = (blocks - 1) * block_size
    log.info(
        "allocating cache",
        budget=str(budget),
        kv_mb=blocks * block_bytes >> 20,
        blocks=blocks,
        tokens=held,
        kv_dtype=_dtypes(spec),
        sequences_at_full_length=round(held / longest, 1),
        host_blocks=host_blocks,
        **({"state_mb": state_bytes >> 20} if spec.states else {}),
        **({"media_mb": encoder_bytes >> 20} if spec.encoder else {}),
    )
    return Limits(
        num_blocks=blocks,
        num_host_blocks=host_blocks,
        max_slots=slots,
        max_model_len=longest,
        max_batched_tokens=steps.usual,
        max_step_tokens=steps.largest,
        block_size=block_size,
        num_encoder_blocks=encoder_blocks,
    )


def _dtypes(spec: CacheSpec) -> str:
    """What the keys and values of tokens are kept as, for the log."""
    found = {"int8" if layer.coded else str(layer.dtype) for layer in spec.paged}
    return ", ".join(sorted(name.removeprefix("torch.") for name in found))
