"""The vision encoder from start to end: bind, load, warm up, serve, drain."""

import asyncio
from contextlib import AsyncExitStack

import structlog
import torch
from redis.asyncio import Redis

from services.families.family import ItemSize
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
from shared.artifacts import store as artifacts
from shared.artifacts.store import ArtifactReader, ArtifactServicer, ArtifactStore, remove_abandoned
from shared.checkpoint.folder import Checkpoint
from shared.devices import require_dtype
from shared.net.registry import Announcement, Directory
from shared.net.rpc.server import RpcServer
from shared.queue import connect
from shared.queue.keys import Keys, new_instance_id
from shared.telemetry.logs import Stopwatch
from shared.telemetry.op_profile import OpProfile
from shared.torch_device import torch_device
from tessera.artifact.v1 import artifact_pb2_grpc
from tessera.vision_encoder.v1 import vision_encoder_pb2_grpc

log = structlog.get_logger(__name__)

_MAX_CONNECTION_AGE_S = 30.0
_WARM_UP = ItemSize(224, 224)  # small: a large one takes seconds on a CPU
_SERVICE_NAME = "tessera.vision_encoder.v1.VisionEncoderService"


async def serve(settings: VisionEncoderSettings, stop: asyncio.Event) -> None:
    """Runs until `stop` is set. Raises ServingError when the service cannot start."""
    watch = Stopwatch()
    server = RpcServer(
        settings.listen,
        advertise=settings.advertise,
        heartbeat=settings.heartbeat,
        max_connection_age_s=_MAX_CONNECTION_AGE_S,
    )
    # Resources are closed after the server: calls under way finish before what they use is closed.
    async with AsyncExitStack() as resources, server:
        log.info("loading", model=str(settings.model), address=server.address)
        device = torch_device(settings.device)
        model, profile = await asyncio.to_thread(_load, settings, device)
        redis = connect(settings.queue_url)
        resources.push_async_callback(redis.aclose)
        instance_id = new_instance_id()
        remove_abandoned(settings.artifact_dir)
        store = ArtifactStore(settings.artifact_dir, instance_id, server.address)
        resources.callback(store.close)
        encoder = None
        if model is None:
            log.warning("the checkpoint has no vision part; every Encode is refused")
        else:
            if profile is not None:
                resources.enter_context(profile.reported())
            encoder = await _encoder(settings, device, model, store, redis, resources)
            if profile is not None:
                profile.clear()  # of the warm-up
        server.add(
            _SERVICE_NAME,
            vision_encoder_pb2_grpc.add_VisionEncoderServiceServicer_to_server,
            VisionEncoderServicer(encoder, settings.model_name),
        )
        server.add(
            artifacts.SERVICE_NAME,
            artifact_pb2_grpc.add_ArtifactServiceServicer_to_server,
            ArtifactServicer(store),
        )
        await server.ready()
        keys = Keys(settings.model_name)
        async with Announcement(redis, keys, "vision_encoder", instance_id, server.address):
            log.info(
                "serving",
                model=settings.model_name,
                address=server.address,
                device=device,
                dtype=str(model.dtype).removeprefix("torch.") if model else "none",
                threads=_threads(settings),
                processors=str(processors.find()),
                start_ms=watch.lap_us() // 1000,
            )
            service_process.settle()
            await stop.wait()
        log.info("draining")
        await server.not_ready()


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
    settings: VisionEncoderSettings,
    device: str,
    model: Encoder,
    store: ArtifactStore,
    redis: Redis,
    resources: AsyncExitStack,
) -> EmbeddingProducer:
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
        Directory(redis, Keys(settings.model_name), "preprocess")
    )
    source = PixelSource(reader, directory)
    resources.push_async_callback(source.close)
    cache = EmbeddingCache(store, settings.encoder_cache_bytes)
    encoder = EmbeddingProducer(model, queue, source, store, cache)
    resources.push_async_callback(encoder.close)
    return encoder
