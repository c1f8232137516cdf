"""The decoder's life: bind, load, warm up, serve, drain."""

import asyncio
import os
import platform
from collections.abc import Callable
from contextlib import nullcontext

import structlog

from services.decoder.devices.base.device import Device
from services.decoder.devices.base.op_profile import profile_ops
from services.decoder.loading.load import Loaded, load
from services.decoder.parallel.leader import Leader
from services.decoder.servicer import DecoderServicer
from services.decoder.session import PLANS_IN_FLIGHT
from services.decoder.settings import DecoderSettings
from services.decoder.worker.executor import Executor
from shared import service_process
from shared.cpu_kernels import host_memory
from shared.net.metrics_page import page, serve_metrics
from shared.net.rpc.server import RpcServer
from shared.queue import connect
from shared.queue.keys import Keys, new_instance_id
from shared.queue.registry import Announcement
from tessera.decoder.v1 import decoder_pb2_grpc
from tessera.decoder.v1.decoder_pb2 import AttentionKind, Hello

log = structlog.get_logger(__name__)

_SERVICE_NAME = "tessera.decoder.v1.DecoderService"


def _settle() -> None:
    service_process.settle()
    host_memory.make_present()


async def serve(
    settings: DecoderSettings,
    stop: asyncio.Event,
    *,
    leader: Leader | None = None,
    load: Callable[[DecoderSettings, Leader | None], Loaded] = load,
    executor: Callable[[], Executor] = Executor,
    settle: Callable[[], None] = _settle,
) -> int:
    """Runs what `load` returns, on the compute thread that `executor` starts, until `stop` is set. Calls `settle` when
    all is loaded, before it serves. leader: has started the other ranks. Raises ServingError for what keeps it from
    starting.
    """
    decoder_id = new_instance_id()
    async with RpcServer(
        settings.listen,
        advertise=settings.advertise,
        redis_url=settings.redis_url,
        heartbeat=settings.heartbeat,
    ) as server:
        log.info("loading", model=str(settings.model), address=server.address, id=decoder_id)
        compute = executor()
        loading = asyncio.create_task(compute.run(lambda: load(settings, leader)))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            os._exit(0)  # no other way to leave the compute thread inside a library's code
        loaded = await loading
        collector = collecting_thread(loaded.device)
        servicer = DecoderServicer(hello(decoder_id, loaded), loaded.worker, compute, collector)
        server.add(_SERVICE_NAME, decoder_pb2_grpc.add_DecoderServiceServicer_to_server, servicer)
        settle()
        await server.ready()
        redis = connect(settings.queue_url)
        keys = Keys(settings.model_name)
        said = loaded.part.to_json()
        announcing = Announcement(
            redis, keys, "decoder", decoder_id, server.address, said, loaded.content
        )
        profiling = profile_ops(loaded.device).reported() if settings.profile_ops else nullcontext()
        metrics = serve_metrics(
            settings.metrics_listen,
            lambda: page("decoder", settings.model_name, servicer.measures),
        )
        with profiling:
            async with metrics, announcing as announcement:
                log.info(
                    "ready",
                    address=server.address,
                    numerics=loaded.numerics,
                    **loaded.part.log_fields,
                )
                await stop.wait()
                log.info("draining")
                await server.not_ready()
                await announcement.withdraw()
                await servicer.drain(settings.shutdown_timeout)
        await loaded.worker.embeddings.close()
        await compute.run(loaded.close)
        await redis.aclose()
        compute.stop()
        if collector is not None:
            collector.stop()
    return 0


def collecting_thread(device: Device) -> Executor | None:
    """Where the steps of a device that computes beside the host are collected."""
    return Executor("collect", device.bind_thread) if device.asynchronous else None


def hello(decoder_id: str, loaded: Loaded) -> Hello:
    """What this decoder is."""
    limits = loaded.worker.limits
    return Hello(
        decoder_id=decoder_id,
        model_fingerprint=loaded.fingerprint,
        block_size=limits.block_size,
        num_blocks=limits.num_blocks,
        num_host_blocks=limits.num_host_blocks,
        max_slots=limits.max_slots,
        max_model_len=limits.max_model_len,
        max_batched_tokens=limits.max_batched_tokens,
        plans_in_flight=PLANS_IN_FLIGHT,
        attention_kind=AttentionKind.Value(f"ATTENTION_KIND_{loaded.needs.attention.name}"),
        host=platform.node(),
        row_invariant=loaded.row_invariant,
        step_us=loaded.profile.step_us,
        token_us=loaded.profile.token_us,
        has_state=loaded.needs.state,
        whole_prompt=loaded.needs.whole_prompt,
        max_step_tokens=limits.max_step_tokens,
        ranks=loaded.part.ranks or 1,
        content=loaded.content,
        numerics=loaded.numerics,
        kv_cache_dtype=loaded.kv_cache,
        encoder_blocks=limits.num_encoder_blocks,
        adapters=loaded.adapters,
        max_adapters=loaded.worker.adapters.places,
        max_drafts=loaded.worker.max_drafts,
    )
