"""From a checkpoint folder to a worker that has made its first steps."""

import hashlib
import json
import time
from dataclasses import dataclass

import structlog
import torch

from services.decoder.devices import load_ops
from services.decoder.devices.base.ops import BaseOps
from services.decoder.devices.base.row_check import rows_are_equal
from services.decoder.loading.memory import (
    cache_budget,
    count_blocks,
    kv_bytes,
    swap_blocks,
)
from services.decoder.loading.profile_run import Profile, profile
from services.decoder.loading.warm_up import warm_up
from services.decoder.models import model_class
from services.decoder.models.decoder_model import DecoderModel
from services.decoder.models.layer_spec import paged_layers
from services.decoder.models.needs import AttentionKind
from services.decoder.settings import DecoderSettings
from services.decoder.worker.embeddings import Embeddings
from services.decoder.worker.plan import Limits
from services.decoder.worker.worker import Worker
from shared.artifacts.store import ArtifactReader
from shared.checkpoint.folder import Checkpoint
from shared.model_config.check import require_dtype
from shared.model_config.families import read_decoder_config
from shared.torch_device import torch_device

log = structlog.get_logger(__name__)

# 256 and 2,048 while somebody reads along (`scheduler.core.rows`).
_BATCHED_TOKENS = {"cpu": 272, "cuda": 2176}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Loaded:
    """What the server needs of a loaded model."""

    worker: Worker
    ops: BaseOps
    fingerprint: bytes
    row_invariant: bool
    profile: Profile
    attention: AttentionKind


def load(settings: DecoderSettings) -> Loaded:
    """Loads and warms up; takes seconds to minutes. Raises ServingError for what cannot be served."""
    began = time.perf_counter()
    checkpoint = Checkpoint(settings.model)
    family = model_class(checkpoint)
    config = read_decoder_config(checkpoint)
    device = torch_device(settings.device)
    dtype = _choose_dtype(settings.dtype, device, checkpoint)
    threads = settings.threads or _automatic_threads(checkpoint)
    ops = load_ops(device, dtype, threads, settings.block_size)
    longest = settings.max_model_len or config.max_position_embeddings
    log.info(
        "found model",
        architecture=checkpoint.architecture,
        layers=config.num_layers,
        device=device,
        dtype=str(dtype).removeprefix("torch."),
    )
    family.needs.require_served()
    model = family.load(checkpoint, ops, longest)
    checkpoint.close()
    tokens = settings.max_num_batched_tokens or _BATCHED_TOKENS[device]
    measured = profile(model, ops, tokens, settings.max_num_seqs, longest)
    limits = _limits(settings, model, ops, longest, tokens, measured, checkpoint.is_small)
    embeddings = Embeddings(ArtifactReader(), ops.device, ops.dtype, settings.embedding_cache_bytes)
    worker = Worker(model, ops, limits, embeddings)
    warm_up(worker)
    log.info(
        "warmed up",
        seconds=round(time.perf_counter() - began, 2),
        step_ms=round(measured.step_us / 1000, 2),
        token_ms=round(measured.token_us / 1000, 3),
    )
    equal = _promises_equal_rows(ops)
    attention = family.needs.attention
    return Loaded(worker, ops, fingerprint(checkpoint, dtype), equal, measured, attention)


def fingerprint(checkpoint: Checkpoint, dtype: torch.dtype) -> bytes:
    """16 bytes over configuration, names of weights and element type."""
    canonical = json.dumps(
        [checkpoint.config, list(checkpoint.names()), str(dtype)], sort_keys=True
    )
    return hashlib.blake2b(canonical.encode(), digest_size=16).digest()


def _promises_equal_rows(ops: BaseOps) -> bool:
    if not ops.row_invariant:
        return False
    equal = rows_are_equal(ops)
    if not equal:
        log.warning("equal tokens are not promised: libraries round by batch size here")
    return equal


def _choose_dtype(asked: str, device: str, checkpoint: Checkpoint) -> torch.dtype:
    require_dtype(asked, device)
    return _DTYPES[checkpoint.default_dtype(device) if asked == "auto" else asked]


def _automatic_threads(checkpoint: Checkpoint) -> int:
    """1 for a small model, whose operations are shorter than the wait for a second thread;
    otherwise 0, one for each core."""
    return 1 if checkpoint.is_small else 0


def _limits(
    settings: DecoderSettings,
    model: DecoderModel,
    ops: BaseOps,
    longest: int,
    tokens: int,
    measured: Profile,
    small: bool,
) -> Limits:
    token_bytes = sum(layer.bytes_per_token for layer in paged_layers(model.layers))
    block_bytes = token_bytes * ops.block_size
    table_blocks = -(-longest // ops.block_size)
    useful = (settings.max_num_seqs * table_blocks + 1) * block_bytes
    share, sharers = settings.gpu_memory_utilization, settings.memory_sharers
    budget = cache_budget(ops.device, share, sharers, measured.step_bytes)
    total = kv_bytes(settings.kv_cache_memory_bytes, budget, useful, small)
    blocks = count_blocks(total, block_bytes, longest, ops.block_size)
    asked = settings.num_host_blocks
    host_blocks = swap_blocks(asked, ops.device, sharers, blocks, block_bytes)
    held = (blocks - 1) * ops.block_size
    log.info(
        "allocating cache",
        step_mb=measured.step_bytes >> 20,
        budget_mb=budget >> 20,
        kv_mb=blocks * block_bytes >> 20,
        blocks=blocks,
        tokens=held,
        at_full_length=round(held / longest, 1),
        host_blocks=host_blocks,
    )
    return Limits(
        num_blocks=blocks,
        num_host_blocks=host_blocks,
        max_slots=settings.max_num_seqs,
        max_model_len=longest,
        max_batched_tokens=tokens,
        block_size=ops.block_size,
    )
