"""From a checkpoint folder to a worker that has made its first steps."""

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog
import torch

from services.decoder.devices import device_class
from services.decoder.devices.base.device import Device
from services.decoder.devices.base.ops import BaseOps
from services.decoder.devices.base.row_check import rows_are_equal
from services.decoder.loading.memory import count_blocks, count_host_blocks, kv_bytes
from services.decoder.loading.profile_run import Profile, profile
from services.decoder.loading.step_size import StepSize, step_size
from services.decoder.loading.warm_up import warm_up
from services.decoder.models.decoder_model import DecoderModel
from services.decoder.models.layer_spec import paged_layers
from services.decoder.models.needs import Needs
from services.decoder.settings import DecoderSettings
from services.decoder.worker.embeddings import Embeddings
from services.decoder.worker.plan import Limits
from services.decoder.worker.worker import Worker
from services.families import registry
from services.families.family import is_generic, load_part
from services.families.generic import require_length
from shared.artifacts.store import ArtifactReader
from shared.checkpoint.folder import Checkpoint
from shared.served_part import ServedPart
from shared.torch_device import torch_device

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Loaded:
    """What the server needs of a loaded model."""

    worker: Worker
    device: Device
    fingerprint: bytes
    row_invariant: bool
    profile: Profile
    needs: Needs
    part: ServedPart


def load(settings: DecoderSettings) -> Loaded:
    """Loads and warms up; takes seconds to minutes. Raises ServingError for what cannot be served."""
    began = time.perf_counter()
    checkpoint = Checkpoint(settings.model)
    sizes = registry.text_sizes(checkpoint, settings.model_backend)
    kind = device_class(torch_device(settings.device))
    dtype = kind.choose_dtype(settings.dtype, checkpoint)
    device = kind(
        dtype,
        threads=settings.threads,
        block_size=settings.block_size,
        small_model=checkpoint.is_small,
    )
    if not settings.kv_cache_memory_bytes:
        device.require_free(settings.gpu_memory_utilization, settings.memory_sharers)
    longest = require_length(settings.max_model_len or sizes.max_position_embeddings)
    log.info(
        "found model",
        architecture=checkpoint.kind,
        layers=sizes.num_layers,
        device=device.name,
        dtype=str(dtype).removeprefix("torch."),
    )
    model = _load_model(settings, checkpoint, device.ops, longest)
    model.needs.require_served()
    checkpoint.close()
    slots = settings.max_num_seqs
    tokens = settings.max_num_batched_tokens or device.default_batched_tokens
    steps = step_size(model.needs, checkpoint, tokens, slots, longest)
    measured = profile(model, device, steps.largest, slots, longest)
    limits = _limits(settings, model, device, longest, steps, measured)
    embeddings = Embeddings(ArtifactReader(), device.copy_in, settings.embedding_cache_bytes)
    worker = Worker(model, device, limits, embeddings)
    warm_up(worker)
    log.info(
        "warmed up",
        seconds=round(time.perf_counter() - began, 2),
        step_ms=round(measured.step_us / 1000, 2),
        token_ms=round(measured.token_us / 1000, 3),
    )
    equal = model.equal_rows and _promises_equal_rows(device.ops)
    name = fingerprint(checkpoint, dtype, model.code)
    off = (*model.needs.off, *(() if equal else ("equal bits in any batch",)))
    part = ServedPart(model.code, off, model.largest_difference)
    return Loaded(worker, device, name, equal, measured, model.needs, part)


def _load_model(
    settings: DecoderSettings, checkpoint: Checkpoint, ops: BaseOps, longest: int
) -> DecoderModel:
    family = registry.find_decoder(checkpoint, settings.model_backend)
    read: Callable[..., DecoderModel] = load_part(family.decoder).load
    if not is_generic(family.decoder):
        return read(checkpoint, ops, longest)
    log.info("the model's layers run by the code of transformers")
    trusted, checked = settings.trust_remote_code, not settings.skip_model_check
    return read(checkpoint, ops, longest, trust_remote_code=trusted, check=checked)


def fingerprint(checkpoint: Checkpoint, dtype: torch.dtype, code: str) -> bytes:
    """16 bytes over configuration, names of weights, element type and whose code runs the layers."""
    canonical = json.dumps(
        [checkpoint.config, list(checkpoint.names()), str(dtype), code], sort_keys=True
    )
    return hashlib.blake2b(canonical.encode(), digest_size=16).digest()


def _promises_equal_rows(ops: BaseOps) -> bool:
    if not ops.row_invariant:
        return False
    equal = rows_are_equal(ops)
    if not equal:
        log.warning("equal tokens are not promised: libraries round by batch size here")
    return equal


def _limits(
    settings: DecoderSettings,
    model: DecoderModel,
    device: Device,
    longest: int,
    steps: StepSize,
    measured: Profile,
) -> Limits:
    block_size, sharers = device.block_size, settings.memory_sharers
    block_bytes = sum(device.ops.block_bytes(layer) for layer in paged_layers(model.layers))
    useful = (settings.max_num_seqs * -(-longest // block_size) + 1) * block_bytes
    budget = device.cache_budget(
        settings.gpu_memory_utilization, sharers, measured.step_bytes, settings.npu_reserved_memory
    )
    asked = settings.kv_cache_memory_bytes or 0
    total = kv_bytes(asked, budget.nbytes, useful)
    reason = "" if asked else str(budget)
    blocks = count_blocks(total, block_bytes, longest, block_size, reason)
    host_blocks = count_host_blocks(
        settings.num_host_blocks, blocks, device.swap_bytes(sharers), block_bytes
    )
    held = (blocks - 1) * block_size
    log.info(
        "allocating cache",
        budget=str(budget),
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
        max_batched_tokens=steps.usual,
        max_step_tokens=steps.largest,
        block_size=block_size,
    )
