"""Makes the parts of a gateway from its settings, in the order in which they need each other."""

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack

from redis.asyncio import Redis

from services.gateway.admission.admission import Admission, QueueLimits
from services.gateway.admission.answer_limits import AnswerLimits
from services.gateway.admission.api_keys import ApiKeys
from services.gateway.admission.held_requests import HeldRequests
from services.gateway.admission.preprocess_pool import PreprocessPool
from services.gateway.admission.request_options import Timeouts
from services.gateway.admission.resume import Resumption
from services.gateway.admission.sent_files import SentFiles
from services.gateway.admission.tenant_weights import TenantWeights, read_weights
from services.gateway.api.batch_forms import BatchForms
from services.gateway.api.generating import Generating
from services.gateway.api.grpc_methods.calls import GrpcCalls
from services.gateway.api.grpc_methods.generating import GrpcGenerating
from services.gateway.api.grpc_methods.pooling import GrpcPooling
from services.gateway.api.parts import Api, FileLimits, Parts
from services.gateway.api.pooling import Pooling
from services.gateway.api.reply_forms import ReplyForms
from services.gateway.body_budget import BodyBudget
from services.gateway.following.cancels import Cancels
from services.gateway.following.follower import Follower
from services.gateway.health import Health
from services.gateway.http.exchange import BodyLimits
from services.gateway.http.inner_calls import InnerCalls
from services.gateway.lasting_work import LastingWork
from services.gateway.model.adapter_loading import AdapterLimits, AdapterLoading
from services.gateway.model.served_adapters import ServedAdapters
from services.gateway.model.served_model import ServedModel
from services.gateway.reading.structured.grammars import Grammars
from services.gateway.settings import GatewaySettings
from services.gateway.slices import Slices
from services.gateway.telemetry.metrics.gateway_state import GatewayState
from services.gateway.telemetry.metrics.metrics import Metrics
from services.gateway.telemetry.metrics.reporter import Reporter
from services.gateway.telemetry.recent_errors import RecentErrors
from services.gateway.telemetry.refusals import Refusals
from services.gateway.telemetry.served_parts import ServedParts
from services.gateway.telemetry.system_state import SystemState
from services.gateway.telemetry.traces.request_timelines import RequestTimelines
from services.gateway.telemetry.traces.sampling import never_sampled
from services.gateway.telemetry.traces.trace_export import exporting_traces
from services.gateway.timings import Timings
from shared.errors import Precondition
from shared.lora.adapter_file import ADAPTER_FILE
from shared.lora.modules import open_modules
from shared.queue import Queue, TokenChannel
from shared.queue.adapters import AdapterDirectory, AdapterRegistry
from shared.queue.keys import Keys
from shared.queue.registry import Directory
from shared.queue.stores.batch_store import BatchStore
from shared.queue.stores.error_store import ErrorStore
from shared.queue.stores.file_store import FileStore
from shared.queue.stores.response_store import ResponseStore
from shared.queue.stores.timeline_store import TimelineStore, TimelineWriter
from shared.telemetry.timeline import Timelines

# A body may be this much smaller in bytes than the message made of it.
_MESSAGE_EXTRA = 1 << 20


def message_limit(settings: GatewaySettings) -> int:
    """Bytes that a message to or from a client or preprocess may have."""
    return settings.max_body_bytes + _MESSAGE_EXTRA


def load_model(settings: GatewaySettings) -> ServedModel:
    """The model; takes a second or more. Raises NotFound, InvalidRequest or Precondition, naming the file."""
    opened = open_modules(
        settings.lora_modules,
        settings.model_name,
        settings.max_lora_rank,
        settings.model,
        settings.lora_adapter_id,
    )
    digests = {name: adapter.lora_id for name, adapter in opened.adapters.items()}  # reads files
    adapters = ServedAdapters({**digests, **dict.fromkeys(opened.own, "")}, opened.default)
    model = ServedModel.load(
        settings.model,
        settings.model_name,
        settings.max_model_len,
        family=settings.family,
        chat_template=settings.chat_template,
        max_choices=settings.max_choices,
        max_logprobs=settings.max_logprobs,
        max_prompts=settings.max_prompts,
        calls=settings.tool_call_parser,
        reasoning=settings.reasoning_parser,
        adapters=adapters,
        task=settings.task,
        pooling=settings.pooling,
    )
    if (digests or settings.allowed_adapter_dir) and model.pooled is not None:
        raise Precondition(
            "UNSUPPORTED_ADAPTER",
            f"--lora-modules, {ADAPTER_FILE}, --allowed-adapter-dir: a model served for vectors or scores takes no"
            " adapters",
        )
    return model


@contextlib.asynccontextmanager
async def open_parts(
    settings: GatewaySettings,
    model: ServedModel,
    redis: Redis,
    instance_id: str,
    apis: Sequence[Api],
    api_keys: ApiKeys,
    budget: BodyBudget,
    errors: RecentErrors,
    timings: Timings,
) -> AsyncIterator[Parts]:
    """The parts that all `apis` share; leaving the block ends their work. Redis may be away."""
    keys = Keys(model.name)
    queue = Queue(redis, keys)
    weights = read_weights(settings.tenant_weights)
    timelines = Timelines("gateway", instance_id)
    timeline_store = TimelineStore(redis, keys)
    async with AsyncExitStack() as stack:
        timeline_writer = await stack.enter_async_context(TimelineWriter(timelines, timeline_store))
        directories = await _open_directories(stack, settings, model, redis, keys)
        health = await stack.enter_async_context(Health(queue, directories))
        slices = Slices()
        follower = await stack.enter_async_context(
            Follower(queue, TokenChannel(redis, keys), slices, timings)
        )
        await stack.enter_async_context(TenantWeights(queue, weights))
        sampler = await stack.enter_async_context(exporting_traces(timeline_store))
        pool = PreprocessPool(directories["preprocess"], message_limit(settings), timings)
        stack.push_async_callback(pool.close)
        registry = AdapterRegistry(redis, keys)
        adapters = await stack.enter_async_context(
            AdapterDirectory(registry, instance_id, lambda found: model.adapters.serve(found.names))
        )
        adapter_limits = AdapterLimits(
            settings.allowed_adapter_dir, settings.max_lora_rank, timings.adapters_s
        )
        error_store = ErrorStore(redis, keys)
        await stack.enter_async_context(errors.written(error_store))
        metrics = Metrics(model.name, model.max_model_len, errors)
        metrics.has_traces = sampler is not never_sampled
        metrics.watch(GatewayState(lambda: len(follower), lambda: health.instances, budget))
        reporter = await stack.enter_async_context(Reporter(queue, metrics.load, instance_id))
        cancels = Cancels(queue)
        stack.push_async_callback(cancels.settled)
        held_requests = await stack.enter_async_context(
            HeldRequests(queue, follower, cancels, metrics, timings)
        )
        reply_forms = ReplyForms([api.reply_forms for api in apis])
        resumption = Resumption(
            model, queue, follower, held_requests, metrics, timelines, reply_forms.id_prefixes
        )
        grammars = Grammars(model)
        stack.callback(grammars.close)
        files = FileStore(redis, keys, settings.file_store_bytes)
        sent_files = SentFiles(files, budget, settings.max_body_bytes)
        admission = Admission(
            model,
            queue,
            pool,
            sent_files,
            follower,
            held_requests,
            cancels,
            resumption,
            metrics,
            QueueLimits(settings.max_waiting_requests, settings.max_waiting_tokens),
            grammars,
            timelines,
            timings=timings,
            shares_prefixes=settings.share_prefix_cache or not settings.api_keys,
            sampler=sampler,
        )
        body_limits = BodyLimits(settings.max_body_bytes, settings.request_body_timeout, budget)
        answer_limits = AnswerLimits(settings.max_answer_bytes, settings.max_answer_bytes_in_flight)
        responses = ResponseStore(
            redis, keys, round(settings.response_keep * 1000), settings.response_store_bytes
        )
        timeouts = Timeouts.of_seconds(
            settings.queue_timeout, settings.first_token_timeout, settings.request_timeout
        )
        generating = Generating(model, admission, metrics, body_limits, answer_limits, timeouts)
        pooling = Pooling(generating, admission, metrics, body_limits, answer_limits, slices)
        refusals = Refusals(model.name, errors, timelines)
        calls = GrpcCalls(model, metrics, refusals, api_keys, timeouts)
        yield Parts(
            model=model,
            reply_forms=reply_forms,
            api_keys=api_keys,
            timeouts=timeouts,
            timings=timings,
            body_limits=body_limits,
            slices=slices,
            health=health,
            metrics=metrics,
            reporter=reporter,
            served_parts=ServedParts(queue),
            system_state=SystemState(queue, errors, error_store),
            follower=follower,
            pool=pool,
            held_requests=held_requests,
            resumption=resumption,
            timelines=RequestTimelines(timeline_store, timeline_writer),
            refusals=refusals,
            admission=admission,
            adapters=AdapterLoading(model, registry, adapters, adapter_limits),
            responses=responses,
            files=files,
            sent_files=sent_files,
            file_limits=FileLimits(
                settings.max_file_bytes,
                settings.request_body_timeout,
                round(settings.file_keep * 1000),
            ),
            batches=BatchStore(redis, keys, settings.file_store_bytes),
            batch_forms=BatchForms(),
            work=await stack.enter_async_context(LastingWork()),
            inner_calls=InnerCalls(keys.tag),
            generating=generating,
            pooling=pooling,
            grpc_generating=GrpcGenerating(model, admission, answer_limits, calls),
            grpc_pooling=GrpcPooling(calls, pooling, answer_limits),
        )


async def _open_directories(
    stack: AsyncExitStack,
    settings: GatewaySettings,
    model: ServedModel,
    redis: Redis,
    keys: Keys,
) -> Mapping[str, Directory]:
    """The services that requests need, by the names that people read."""
    services = {"preprocess": "preprocess", "decoder": "decoder"}
    if model.has_vision and not settings.language_model_only:
        services["vision encoder"] = "vision_encoder"
    return {
        name: await stack.enter_async_context(Directory(redis, keys, service))
        for name, service in services.items()
    }
