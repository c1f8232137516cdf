"""The vision encoder from start to end: bind, load, warm up, serve, drain."""

import asyncio

import structlog
import torch

from services.families import registry
from services.families.family import ItemSize
from services.families.report import code_of
from services.vision_encoder.cache import EmbeddingCache
from services.vision_encoder.devices import load_tower_ops
from services.vision_encoder.devices.op_profile import profile_ops
from services.vision_encoder.embedding_producer import EmbeddingProducer
from services.vision_encoder.loading import load_encoder
from services.vision_encoder.pixel_source import PixelSource
from services.vision_encoder.queue import TowerQueue
from services.vision_encoder.servicer import VisionEncoderServicer
from services.vision_encoder.settings import VisionEncoderSettings
from services.vision_encoder.towers.encoder import Encoder
from shared import processors, service_process
from shared.artifacts.producer import Producer, open_producer
from shared.artifacts.store import ArtifactReader
from shared.checkpoint.folder import Checkpoint
from shared.devices import require_dtype
from shared.net.registry import Directory
from shared.served_part import ServedPart
from shared.telemetry.logs import Stopwatch
from shared.telemetry.op_profile import OpProfile
from shared.torch_device import torch_device
from tessera.vision_encoder.v1 import vision_encoder_pb2_grpc

log = structlog.get_logger(__name__)

_WARM_UP = ItemSize(224, 224)  # small: a large one takes seconds on a CPU
_SERVICE_NAME = "tessera.vision_encoder.v1.VisionEncoderService"


async def serve(settings: VisionEncoderSettings, stop: asyncio.Event) -> None:
    """Runs until `stop` is set. Raises ServingError when the service cannot start."""
    watch = Stopwatch()
    async with open_producer(settings) as producer:
        device = torch_device(settings.device)
        model, profile = await asyncio.to_thread(_load, settings, device)
        encoder = None
        if model is None:
            log.warning("the checkpoint has no vision part; every Encode is refused")
        else:
            if profile is not None:
                producer.resources.enter_context(profile.reported())
            encoder = await _encoder(settings, device, model, producer)
            if profile is not None:
                profile.clear()  # of the warm-up
        producer.server.add(
            _SERVICE_NAME,
            vision_encoder_pb2_grpc.add_VisionEncoderServiceServicer_to_server,
            VisionEncoderServicer(encoder, settings.model_name),
        )
        part = ServedPart(code_of(registry.find(Checkpoint(settings.model)).encoder))
        async with producer.serving("vision_encoder", part):
            log.info(
                "serving",
                model=settings.model_name,
                address=producer.server.address,
                device=device,
                dtype=str(model.dtype).removeprefix("torch.") if model else "none",
                threads=_threads(settings),
                processors=str(processors.find()),
                start_ms=watch.lap_us() // 1000,
                **part.content,
            )
            service_process.settle()
            await stop.wait()


def _load(settings: VisionEncoderSettings, device: str) -> tuple[Encoder | None, OpProfile | None]:
    require_dtype(settings.dtype, device)
    checkpoint = Checkpoint(settings.model)
    name = checkpoint.default_dtype(device) if settings.dtype == "auto" else settings.dtype
    where, dtype, threads = torch.device(device), getattr(torch, name), _threads(settings)
    ops = load_tower_ops(where, dtype, threads) if settings.profile_ops else None
    model = load_encoder(checkpoint, where, dtype, threads, ops)
    checkpoint.close()
    if settings.profile_ops and ops is None:
        log.warning("the tower runs as torch modules here: it has no ops to profile")
    return model, None if ops is None else profile_ops(ops)


def _threads(settings: VisionEncoderSettings) -> int:
    return settings.threads or processors.threads()


async def _encoder(
    settings: VisionEncoderSettings, device: str, model: Encoder, producer: Producer
) -> EmbeddingProducer:
    resources = producer.resources
    queue = TowerQueue(model, settings.batch_patches(device))
    resources.callback(queue.close)

    def warm_up() -> None:
        # Two thread pools would compete for the cores.
        torch.set_num_threads(1 if model.on_kernels else _threads(settings))
        model.encode([model.sample(_WARM_UP)])

    await queue.on_thread(warm_up)
    reader = ArtifactReader()
    resources.push_async_callback(reader.close)
    directory = await resources.enter_async_context(
        Directory(producer.redis, producer.keys, "preprocess")
    )
    source = PixelSource(reader, directory)
    resources.push_async_callback(source.close)
    cache = EmbeddingCache(producer.store, settings.encoder_cache_bytes)
    encoder = EmbeddingProducer(model, queue, source, producer.store, cache)
    resources.push_async_callback(encoder.close)
    return encoder
