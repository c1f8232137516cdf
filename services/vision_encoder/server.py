"""The vision encoder from start to end: bind, load, warm up, serve, drain."""

import asyncio
from collections.abc import Callable

import structlog

from services.families import registry
from services.families.family import ItemSize
from services.families.report import code_of
from services.vision_encoder.batch_size import fit_batch
from services.vision_encoder.cache import EmbeddingCache
from services.vision_encoder.devices import device_class
from services.vision_encoder.devices.base.accelerator import Accelerator
from services.vision_encoder.devices.base.device import Device
from services.vision_encoder.devices.op_profile import profile_ops
from services.vision_encoder.embedding_producer import EmbeddingProducer
from services.vision_encoder.loading import load_encoder
from services.vision_encoder.measures import EncoderMeasures
from services.vision_encoder.pixel_source import PixelSource
from services.vision_encoder.queue import TowerQueue
from services.vision_encoder.servicer import VisionEncoderServicer
from services.vision_encoder.settings import VisionEncoderSettings
from services.vision_encoder.towers.encoder import Encoder
from shared import service_process
from shared.artifacts.producer import Producer, open_producer
from shared.artifacts.store import ArtifactReader
from shared.checkpoint.content import content_digest
from shared.checkpoint.folder import Checkpoint
from shared.hardware import processors
from shared.hardware.torch_device import torch_device
from shared.net.metrics_page import page, serve_metrics
from shared.queue.registry import Directory
from shared.served_part import ServedPart
from shared.telemetry.logs import Stopwatch
from tessera.common.v1.media_pb2 import Modality
from tessera.vision_encoder.v1 import vision_encoder_pb2_grpc

log = structlog.get_logger(__name__)

_WARM_UP = ItemSize(224, 224)  # small: a large one takes seconds on a CPU
_SERVICE_NAME = "tessera.vision_encoder.v1.VisionEncoderService"


async def serve(
    settings: VisionEncoderSettings,
    stop: asyncio.Event,
    *,
    settle: Callable[[], None] = service_process.settle,
) -> None:
    """Runs until `stop` is set. `settle` is called when all is loaded, before it serves. Raises ServingError when the
    service cannot start.
    """
    settings.share_with_libraries()
    watch = Stopwatch()
    async with open_producer(settings) as producer:
        device, model, content = await asyncio.to_thread(_load, settings)
        profile = profile_ops(device) if settings.profile_ops else None
        encoder, numerics, measures = None, "", EncoderMeasures()
        measures.device, measures.device_memory = device.name, device.memory_by_kind
        if model is None:
            log.warning("the checkpoint has no vision part; every Encode is refused")
        else:
            if profile is not None:
                producer.resources.enter_context(profile.reported())
            numerics = device.numerics(model.uses_ops)
            encoder = await _encoder(settings, device, model, producer, measures)
            if profile is not None:
                profile.clear()  # of the warm-up
        family = registry.find(Checkpoint(settings.model, settings.family))
        producer.server.add(
            _SERVICE_NAME,
            vision_encoder_pb2_grpc.add_VisionEncoderServiceServicer_to_server,
            VisionEncoderServicer(
                encoder, family.modalities, settings.model_name, content, numerics
            ),
        )
        part = ServedPart(code_of(family.encoder))
        settle()
        metrics = serve_metrics(
            settings.metrics_listen,
            lambda: page("vision_encoder", settings.model_name, measures),
        )
        async with metrics, producer.serving("vision_encoder", part, measures.load, numerics):
            log.info(
                "ready",
                model=settings.model_name,
                address=producer.server.address,
                device=device.name,
                dtype=str(model.dtype).removeprefix("torch.") if model else "none",
                threads=_threads(settings),
                processors=str(processors.find()),
                content=content.hex(),
                numerics=numerics,
                start_ms=watch.lap_us() // 1000,
                **part.log_fields,
            )
            await stop.wait()


def _load(settings: VisionEncoderSettings) -> tuple[Device, Encoder | None, bytes]:
    checkpoint = Checkpoint(settings.model, settings.family)
    kind = device_class(torch_device(settings.device))
    device = kind(kind.choose_dtype(settings.dtype, checkpoint), _threads(settings))
    model = load_encoder(checkpoint, device)
    content = content_digest(checkpoint) if model is not None else b""
    checkpoint.close()
    if settings.profile_ops and model is not None and not model.uses_ops:
        log.warning("pictures are encoded by modules of torch: there are no ops to profile")
    return device, model, content


def _threads(settings: VisionEncoderSettings) -> int:
    return settings.threads or processors.threads()


async def _encoder(
    settings: VisionEncoderSettings,
    device: Device,
    model: Encoder,
    producer: Producer,
    measures: EncoderMeasures,
) -> EmbeddingProducer:
    resources = producer.resources
    most = settings.max_batch_patches or device.default_batch_patches
    queue = TowerQueue(model, device, most, measures)
    resources.callback(queue.close)

    def warm_up() -> None:
        device.enter_thread(model.uses_ops)
        if isinstance(device, Accelerator):
            checkpoint = Checkpoint(settings.model, settings.family)
            largest = registry.find(checkpoint).largest(checkpoint, Modality.MODALITY_IMAGE)
            share = settings.encoder_memory_utilization
            queue.max_patches = fit_batch(model, device, largest, queue.max_patches, share)
        model.encode([model.sample(_WARM_UP)])

    await queue.on_thread(warm_up)
    reader = ArtifactReader()
    resources.push_async_callback(reader.close)
    directory = await resources.enter_async_context(
        Directory(producer.redis, producer.keys, "preprocess")
    )
    source = PixelSource(reader, directory)
    resources.push_async_callback(source.close)
    wanted = settings.encoder_cache_bytes
    producer.store.space.warn_if_small("--encoder-cache-bytes", wanted)
    cache = EmbeddingCache(producer.store, wanted)
    encoder = EmbeddingProducer(model, queue, source, producer.store, cache, measures)
    resources.push_async_callback(encoder.close)
    return encoder
