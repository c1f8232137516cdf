"""From a checkpoint folder to a worker that has made its first steps."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import structlog
import torch

from services.decoder.devices import device_class
from services.decoder.devices.base.device import Device
from services.decoder.devices.base.ops import BaseOps
from services.decoder.devices.base.row_check import rows_are_equal
from services.decoder.loading.adapters import adapter_reader
from services.decoder.loading.graphs import find_graphs, graph_bytes, require_graphs
from services.decoder.loading.limits import find_limits
from services.decoder.loading.not_finite import not_finite
from services.decoder.loading.profile_run import Profile, profile
from services.decoder.loading.quality import tell_cache, tell_codes
from services.decoder.loading.step_size import step_size
from services.decoder.loading.warm_up import NotFinite, warm_up
from services.decoder.media.embeddings import Embeddings
from services.decoder.models.cache_spec import cache_spec
from services.decoder.models.decoder_model import DecoderModel
from services.decoder.parallel.embeddings import LeadingEmbeddings
from services.decoder.parallel.leader import Leader
from services.decoder.parallel.leading_worker import LeadingWorker
from services.decoder.parallel.place import Place
from services.decoder.parallel.refusal import require_divisible
from services.decoder.ranks.rank_group import connect, disconnect
from services.decoder.ranks.share import Share
from services.decoder.sampling.grammar_matcher import GrammarMatcher
from services.decoder.sampling.grammar_tokenizer import GrammarTokenizer
from services.decoder.settings import DecoderSettings
from services.decoder.speculation.modes import make_proposer
from services.decoder.speculation.proposer import Proposer
from services.decoder.steps.needs import Needs
from services.decoder.worker.planned_adapters import PlannedAdapters
from services.decoder.worker.worker import Worker
from services.families import registry
from services.families.comparison import Comparison, compares_pictures
from services.families.family import is_generic, load_part
from services.families.generic import require_length
from shared import kv_cache_dtype
from shared.artifacts.store import ArtifactReader
from shared.checkpoint.content import content_digest
from shared.checkpoint.folder import Checkpoint
from shared.errors import InvalidRequest
from shared.hardware.torch_device import torch_device
from shared.lora.modules import open_modules
from shared.model_config.quantization import quantization_said
from shared.served_part import ServedPart
from shared.weights.scheme import AUTO, NONE, find_scheme, refuse_for_transformers

log = structlog.get_logger(__name__)

_ORIGIN = ("_name_or_path", "transformers_version")


@dataclass(frozen=True)
class Loaded:
    """What the server needs of a loaded model."""

    worker: Worker
    device: Device
    fingerprint: bytes
    content: bytes  # the digest of the weights (`shared/checkpoint/content.py`)
    numerics: (
        str  # what else its bits depend on (`shared/numerics.py`); of several ranks the first one's
    )
    row_invariant: bool
    profile: Profile
    needs: Needs
    part: ServedPart
    adapters: Sequence[str] = ()  # digests of those that it has
    kv_cache: str = ""  # how keys and values are kept where that is not as the model computes
    # Ends the other ranks, where there are any, after all steps.
    close: Callable[[], None] = lambda: None


def load(settings: DecoderSettings, leader: Leader | None = None) -> Loaded:
    """Loads and warms up; takes seconds to minutes. Of several ranks this process becomes the first; `leader` has
    started the others, if that was done before. Raises ServingError for what cannot be served."""
    began = time.perf_counter()
    with _compared(settings):
        if settings.tensor_parallel_size > 1:
            loaded = _lead(settings, leader or Leader.start(settings))
        else:
            loaded = load_rank(Place(settings))
    try:
        warm_up(loaded.worker)
    except NotFinite:
        loaded.close()
        checkpoint = Checkpoint(settings.model, settings.family)
        raise not_finite(checkpoint, loaded.device.ops.dtype) from None
    log.info(
        "warmed up",
        seconds=round(time.perf_counter() - began, 2),
        step_ms=round(loaded.profile.step_us / 1000, 2),
        token_ms=round(loaded.profile.token_us / 1000, 3),
    )
    return loaded


@contextmanager
def _compared(settings: DecoderSettings) -> Iterator[None]:
    """While the model is loaded, another process compares prompts with pictures, whose encoder and prompt are other
    services', where they are the code of transformers. Raises InvalidRequest at the end for one that differs."""
    checkpoint = Checkpoint(settings.model, settings.family)
    backend = settings.model_backend
    if settings.skip_model_check or not compares_pictures(checkpoint, backend):
        yield
        return
    trusted = settings.trust_remote_code
    with Comparison(checkpoint, backend, trusted) as comparison:
        try:
            yield
        except InvalidRequest:  # of two reasons the one that `tessera check` gives
            comparison.require_equal()
            raise
        comparison.require_equal()
    log.info(
        "prompts with pictures compared with the model's own forward", before=comparison.was_known
    )


def _lead(settings: DecoderSettings, leader: Leader) -> Loaded:
    def close() -> None:
        leader.close()
        disconnect()

    try:
        require_divisible(
            Checkpoint(settings.model, settings.family),
            settings.tensor_parallel_size,
            settings.model_backend,
            settings.trust_remote_code,
        )
        loaded = load_rank(
            leader.place,
            partial(LeadingEmbeddings, leader=leader),
            partial(LeadingWorker, leader=leader),
        )
        assert loaded.device.ops.ranks is not None
        loaded.device.ops.ranks.settle()
        return replace(loaded, close=close)
    except BaseException:
        close()
        raise


def load_rank(
    place: Place,
    make_embeddings: Callable[..., Embeddings] = Embeddings,
    make_worker: Callable[..., Worker] = Worker,
) -> Loaded:
    """What `place` has of the model; waits for the other ranks, where there are any. The functions take the arguments
    of the classes. Raises ServingError as `load` does."""
    settings, share = place.settings, Share(place.rank, place.size)
    settings.share_with_libraries()
    checkpoint = Checkpoint(settings.model, settings.family)
    tokenizer = GrammarTokenizer.begin(Checkpoint(settings.model, settings.family))
    threads = place.threads(checkpoint.is_small)
    if place.cpus:
        # Of this thread, and those that it starts: the ones that compute.
        os.sched_setaffinity(0, place.cpus)
    sizes = registry.text_sizes(checkpoint, settings.model_backend)
    device = _open_device(settings, checkpoint, threads)
    longest = require_length(settings.max_model_len or sizes.max_position_embeddings)
    log.info(
        "found model",
        architecture=checkpoint.kind,
        layers=sizes.num_layers,
        device=device.name,
        dtype=str(device.ops.dtype).removeprefix("torch."),
    )
    with device.explaining():
        device.ops.share = share
        if place.meeting is not None:
            device.ops.ranks = connect(share, device.rank_backend, place.meeting)
        model = _load_model(settings, checkpoint, device.ops, longest)
        # Before the cache is sized: they take memory that it could have.
        given = settings.lora_modules, settings.model_name, settings.max_lora_rank, settings.model
        model.load_adapters(checkpoint, open_modules(*given).adapters)
        planned = _planned_adapters(settings, model, checkpoint, device)
        if device.ops.ranks is not None:
            device.ops.ranks.settle()
        spec = cache_spec(model.layers)
        model.needs.require_state(not spec.is_paged_alone)
        if device.ops.codes_cache and not spec.paged:
            raise kv_cache_dtype.refused(
                kv_cache_dtype.INT8,
                "no layer of the model has keys and values; leave the flag away",
            )
        # The first rank alone says hello. What was just read is read again, most of it from memory.
        content = b"" if place.rank else _content(checkpoint)
        tell_codes(checkpoint, settings.quantization, device.ops, content)
        tell_cache(checkpoint, settings.quantization, settings.kv_cache_dtype, content)
        checkpoint.close()
        slots = settings.max_num_seqs
        tokens = settings.max_num_batched_tokens or device.default_batched_tokens
        steps = step_size(model.needs, checkpoint, tokens, slots, longest)
        measured = profile(model, device, steps.largest, slots, longest)
        graphs = graph_bytes(settings.graphs, model, device, slots, longest)
        places = planned.places * model.adapter_bytes(settings.max_lora_rank)
        limits = find_limits(
            settings, spec, device, longest, steps, measured.step_bytes, graphs, places
        )
        embeddings = make_embeddings(
            ArtifactReader(), device.copy_in, settings.embedding_cache_bytes
        )
        equal = model.equal_rows and _promises_equal_rows(device.ops)
        proposer = _proposer(settings, model, equal_rows=equal)
        worker = make_worker(
            model,
            device,
            limits,
            embeddings,
            GrammarMatcher(tokenizer),
            planned,
            proposer,
            settings.speculation_tokens,
        )
        worker.graphs = find_graphs(settings.graphs, model, device, worker)
        if (error := tokenizer.exception()) is not None:  # waits until it is there
            log.warning("grammars are refused", reason=str(error))
        name = fingerprint(
            checkpoint,
            device.ops.dtype,
            model.code,
            share.size,
            settings.quantization,
            settings.kv_cache_dtype,
        )
        off = (*model.needs.off, *(() if equal else ("equal bits in any batch",)))
        ranks = share.size if share.size > 1 else None
        part = ServedPart(model.code, off, model.largest_difference, ranks)
        numerics = device.numerics(by_torch=model.code != DecoderModel.code)
        return Loaded(
            worker=worker,
            device=device,
            fingerprint=name,
            content=content,
            numerics=numerics,
            row_invariant=equal,
            profile=measured,
            needs=model.needs,
            part=part,
            adapters=tuple(model.adapters),
            kv_cache=kv_cache_dtype.INT8 if device.ops.codes_cache else "",
        )


def _open_device(settings: DecoderSettings, checkpoint: Checkpoint, threads: int) -> Device:
    """The device, told how weights and the cache are to be kept. Raises InvalidRequest for settings that it does not
    have, Unavailable where its memory is taken."""
    kind = device_class(torch_device(settings.device))
    device = kind(
        kind.choose_dtype(settings.dtype, checkpoint),
        threads=threads,
        block_size=settings.block_size,
        small_model=checkpoint.is_small,
        forms=settings.npu_forms,
        weights=settings.npu_weights,
    )
    require_graphs(settings.graphs, device)
    device.require_scheme(settings.quantization)
    device.ops.scheme = device.find_scheme(settings.quantization, checkpoint.num_parameters)
    device.ops.keeps_codes = settings.quantization != NONE
    device.require_kv_cache(settings.kv_cache_dtype)
    device.ops.codes_cache = settings.kv_cache_dtype == kv_cache_dtype.INT8
    if not settings.kv_cache_memory_bytes:
        device.require_free(settings.gpu_memory_utilization, settings.memory_sharers)
    return device


def _load_model(
    settings: DecoderSettings, checkpoint: Checkpoint, ops: BaseOps, longest: int
) -> DecoderModel:
    family = registry.find_decoder(checkpoint, settings.model_backend)
    if is_generic(family.decoder):
        refuse_for_transformers(settings.quantization, checkpoint.kind)
    read: Callable[..., DecoderModel] = load_part(family.decoder).load
    if not is_generic(family.decoder):
        return read(checkpoint, ops, longest)
    log.info("the model's layers run by the code of transformers")
    trusted, checked = settings.trust_remote_code, not settings.skip_model_check
    return read(checkpoint, ops, longest, trust_remote_code=trusted, check=checked)


def _proposer(
    settings: DecoderSettings, model: DecoderModel, *, equal_rows: bool
) -> Proposer | None:
    needs = model.needs
    if needs.state or needs.whole_prompt or not model.generates:
        if settings.speculation == "suffix":
            log.warning("no drafts: layers keep state, or prompts are computed whole")
        return None
    proposer = make_proposer(settings.speculation, equal_rows=equal_rows)
    if proposer is not None and not equal_rows:
        log.warning("drafts may change answers: equal tokens are not promised here")
    return proposer


def _planned_adapters(
    settings: DecoderSettings, model: DecoderModel, checkpoint: Checkpoint, device: Device
) -> PlannedAdapters:
    read = adapter_reader(settings, model)
    if read is None:
        return PlannedAdapters(model.drop_adapter)
    model.require_adapters(checkpoint.kind)
    return PlannedAdapters(model.drop_adapter, read, settings.max_loras, device.bind_thread)


def _content(checkpoint: Checkpoint) -> bytes:
    began = time.perf_counter()
    content = content_digest(checkpoint)
    log.info(
        "digest of the weights",
        content=content.hex(),
        ms=round(1e3 * (time.perf_counter() - began)),
    )
    return content


def fingerprint(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    code: str,
    ranks: int = 1,
    quantization: str = AUTO,
    kv_cache: str = kv_cache_dtype.AUTO,
) -> bytes:
    """16 bytes over configuration, names of weights, element type, whose code runs the layers, in how many summands
    their results are computed, how weights are quantized when they are loaded, and how the cache is. What a
    configuration says of its own origin does not count: a fine-tune says another."""
    depends = [
        _without_origin(checkpoint.config),
        list(checkpoint.names()),
        str(dtype),
        code,
        ranks,
    ]
    if quantization == NONE and quantization_said(checkpoint) is not None:
        depends.append("numbers")
    scheme = find_scheme(quantization, checkpoint.num_parameters)
    if scheme is not None:
        depends.append([scheme.bits, scheme.group, scheme.digits])
    if kv_cache != kv_cache_dtype.AUTO:
        depends.append({"kv_cache": kv_cache})
    canonical = json.dumps(depends, sort_keys=True)
    return hashlib.blake2b(canonical.encode(), digest_size=16).digest()


def _without_origin(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    return {key: _without_origin(value) for key, value in config.items() if key not in _ORIGIN}


def _promises_equal_rows(ops: BaseOps) -> bool:
    if not ops.row_invariant:
        return False
    equal = rows_are_equal(ops)
    if not equal:
        log.warning("equal tokens are not promised: libraries round by batch size here")
    return equal
