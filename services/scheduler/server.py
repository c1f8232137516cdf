"""The life of a scheduler process: connect, register, work, drain."""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import structlog

from services.scheduler.core.planner import PreemptionMode
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence import POLICIES
from services.scheduler.decoders.adapter_loads import AdapterLoads
from services.scheduler.decoders.link import LinkOptions
from services.scheduler.dispatcher import Dispatcher
from services.scheduler.encoders import Encoders
from services.scheduler.requests.output_tracker import KEPT_S
from services.scheduler.requests.ownership import Ownership
from services.scheduler.servicer import SchedulerServicer
from services.scheduler.settings import SchedulerSettings
from shared import service_process
from shared.errors import InvalidRequest
from shared.net import tasks
from shared.net.metrics_page import page, serve_metrics
from shared.net.rpc.server import RpcServer
from shared.queue import ControlChannel, Lifetimes, Queue, connect
from shared.queue.adapters import AdapterDirectory, AdapterRegistry
from shared.queue.keys import Keys, new_instance_id
from shared.queue.registry import Announcement, Directory
from shared.queue.stores.media_store import MediaStore
from shared.queue.stores.timeline_store import TimelineStore, TimelineWriter
from shared.telemetry.timeline import Timelines
from shared.text.text_fold import TokenBytes
from tessera.scheduler.v1.scheduler_pb2_grpc import add_SchedulerServiceServicer_to_server

log = structlog.get_logger(__name__)

_DRAIN_S = 2.0
# Of the goal for a first token: what a request may have waited and still be in time. Computing it takes the rest.
_WAIT_SHARE = 0.4
FENCED = 3  # exit status: another scheduler took over; start a new incarnation


async def serve(
    settings: SchedulerSettings,
    stop: asyncio.Event,
    *,
    core: type[Scheduler] = Scheduler,
    kept_s: float = KEPT_S,
    settle: Callable[[], None] = service_process.settle,
) -> int:
    """Runs until `stop` is set (0) or until this incarnation is fenced off (3). `core` decides for each decoder;
    requests that have ended are kept for `kept_s`; `settle` is called when all is loaded, before the scheduler takes
    requests.
    """
    keys = Keys(settings.model_name)
    scheduler_id = new_instance_id()
    redis = connect(settings.queue_url)
    lifetimes = Lifetimes(
        same_content_ms=round(1000 * settings.changed_model_timeout),
        late_after_ms=round(1000 * _WAIT_SHARE * settings.first_token_goal),
    )
    queue = Queue(redis, keys, lifetimes)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(redis.aclose)
        server = await stack.enter_async_context(
            RpcServer(
                settings.listen,
                advertise=settings.advertise,
                redis_url=settings.redis_url,
                heartbeat=settings.heartbeat,
            )
        )
        table = _read_table(settings.model / "tokenizer.json")
        decoders = Directory(redis, keys, "decoder")
        encoders = Directory(redis, keys, "vision_encoder")
        registry = AdapterRegistry(redis, keys)
        adapters = AdapterDirectory(registry)
        timelines = Timelines("scheduler", scheduler_id)
        dispatcher = Dispatcher(
            queue,
            ControlChannel(redis, keys),
            decoders,
            Encoders(encoders),
            MediaStore(redis),
            AdapterLoads(registry, adapters),
            table,
            scheduler_id,
            timelines,
            TimelineWriter(timelines, TimelineStore(redis, keys, lifetimes)),
            link_options=LinkOptions(
                lead_s=settings.lead_ms / 1000,
                encoder_budget=settings.encoder_budget or None,
                step_target_s=settings.step_target_ms / 1000,
                policy=POLICIES[settings.scheduling_policy],
                preemption_mode=PreemptionMode(settings.preemption_mode),
                core=core,
            ),
            kept_s=kept_s,
        )
        ownership = Ownership(
            queue,
            scheduler_id,
            dispatcher.load,
            dispatcher.tokens_per_s,
            dispatcher.note_others,
            dispatcher.contents,
        )
        settle()
        await ownership.register()
        await stack.enter_async_context(decoders)
        await stack.enter_async_context(encoders)
        await stack.enter_async_context(adapters)
        await stack.enter_async_context(
            Announcement(redis, keys, "scheduler", scheduler_id, server.address)
        )
        await stack.enter_async_context(
            serve_metrics(
                settings.metrics_listen,
                lambda: page("scheduler", settings.model_name, dispatcher.measures),
            )
        )
        server.add(
            "tessera.scheduler.v1.SchedulerService",
            add_SchedulerServiceServicer_to_server,
            SchedulerServicer(dispatcher),
        )
        await server.ready()
        log.info("ready", scheduler=scheduler_id, model=settings.model_name)
        return await _work(dispatcher, ownership, stop)


def _read_table(path: Path) -> TokenBytes:
    try:
        return TokenBytes.from_tokenizer_json(path)
    except (OSError, ValueError) as error:
        raise InvalidRequest("BAD_TOKENIZER", f"{path}: {error}", field="model") from error


async def _work(dispatcher: Dispatcher, ownership: Ownership, stop: asyncio.Event) -> int:
    work = asyncio.create_task(dispatcher.run())
    lease = asyncio.create_task(ownership.run())
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((work, lease, stopped), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()  # raises what broke it
        if lease.done():
            lease.result()
            return FENCED
        log.info("draining")
        await dispatcher.drain(_DRAIN_S)
        return 0
    finally:
        await tasks.end(work, lease, stopped)
