"""One gateway process: REST and gRPC over one admission, and the order in which it starts and stops."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import structlog

from services.gateway.admission.admission import Admission, QueueLimits
from services.gateway.admission.answer_limits import AnswerLimits
from services.gateway.admission.api_keys import ApiKeys
from services.gateway.admission.held_requests import HeldRequests
from services.gateway.admission.model import ServedModel
from services.gateway.admission.preprocess_pool import PreprocessPool
from services.gateway.admission.request_options import Timeouts
from services.gateway.admission.tenant_weights import TenantWeights, read_weights
from services.gateway.api.generating import Generating
from services.gateway.api.openai.completions import Completions
from services.gateway.api.openai.endpoint import OpenAiEndpoint
from services.gateway.api.openai.models import Models
from services.gateway.api.openai.tokenize import Tokenizing
from services.gateway.api.tessera.endpoint import TesseraEndpoint
from services.gateway.api.tessera.grpc_chat import ChatServicer
from services.gateway.api.tessera.grpc_limits import CallLimits
from services.gateway.api.tessera.information import Information
from services.gateway.api.tessera.requests import Requests
from services.gateway.api.writers import make_writer
from services.gateway.following.cancels import Cancels
from services.gateway.following.follower import Follower
from services.gateway.following.resume import Resumption
from services.gateway.health import Health
from services.gateway.http.app import App
from services.gateway.http.body_budget import BodyBudget
from services.gateway.http.cross_origin import CrossOrigin
from services.gateway.http.exchange import BodyLimits
from services.gateway.http.hosts import Hosts
from services.gateway.http.open_files import connections_within_limits
from services.gateway.http.protocol import HttpLimits
from services.gateway.http.server import HttpServer
from services.gateway.settings import GatewaySettings
from services.gateway.slices import Slices
from services.gateway.telemetry.metrics import Metrics
from services.gateway.telemetry.reporter import Reporter
from services.gateway.telemetry.served_parts import ServedParts
from shared import access, service_process
from shared.net import tasks
from shared.net.registry import Announcement, Directory
from shared.net.rpc.server import RpcServer
from shared.net.server_tls import ServerTls
from shared.queue import Queue, TokenChannel, connect
from shared.queue.keys import Keys, new_instance_id
from tessera.gateway.v1 import chat_pb2, chat_pb2_grpc

log = structlog.get_logger(__name__)

_SERVICE = chat_pb2.DESCRIPTOR.services_by_name["ChatService"].full_name
# A body may be this much smaller in bytes than the message made of it.
_MESSAGE_EXTRA = 1 << 20
# The servers close what is open at the end of the shutdown timeout; from a little before that on, a
# closed answer is no client that has left.
_EARLIER_S = 0.1
_GRPC_IDLE_MS = 300_000


@dataclass(frozen=True, slots=True)
class Gateway:
    """A running gateway: its addresses, and its parts for tests and measurements."""

    url: str
    grpc_address: str
    model: ServedModel
    admission: Admission
    follower: Follower
    health: Health
    http_server: HttpServer


async def run_gateway(
    settings: GatewaySettings,
    stop: asyncio.Event,
    *,
    http: Callable[..., HttpServer] = HttpServer,
    settle: Callable[[], None] = service_process.settle,
) -> None:
    """Runs until `stop` is set, then drains. `settle` is called when all is loaded, before it serves."""
    async with open_gateway(settings, http, settle) as gateway:
        log.info("ready", url=gateway.url, grpc=gateway.grpc_address, model=gateway.model.name)
        await _until_told(stop, gateway.http_server)
        log.info("draining", open_answers=len(gateway.follower))


@contextlib.asynccontextmanager
async def open_gateway(
    settings: GatewaySettings,
    http: Callable[..., HttpServer] = HttpServer,
    settle: Callable[[], None] = lambda: None,
) -> AsyncIterator[Gateway]:
    """Starts a gateway whose REST endpoints `http` serves, once it has called `settle`; leaving the block drains it
    within `shutdown_timeout`.

    Raises ServingError if an address is taken or the model cannot be read. Redis may be away: it is
    not ready then.
    """
    tls = ServerTls.of(settings)
    limit = settings.max_body_bytes + _MESSAGE_EXTRA
    weights = read_weights(settings.tenant_weights)
    api_keys = _api_keys(settings)
    budget = BodyBudget(max(settings.max_body_bytes_in_flight, 2 * limit))
    grpc_server = RpcServer(
        _join(settings.host, settings.grpc_port),
        credentials=tls.grpc_credentials() if tls else None,
        heartbeat=settings.heartbeat,
        max_message_bytes=limit,
        limits=_grpc_limits(settings),
        gate=CallLimits(api_keys, limit, budget),
        grace_s=0.5,
        public=True,
    )
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(grpc_server)
        http_server = http(
            settings.host, settings.port, settings.shutdown_timeout, _http_limits(settings), tls
        )
        stack.callback(http_server.unbind)
        model = await asyncio.to_thread(
            ServedModel.load,
            settings.model,
            settings.model_name,
            settings.max_model_len,
            family=settings.family,
            chat_template=settings.chat_template,
            max_choices=settings.max_choices,
            max_logprobs=settings.max_logprobs,
            max_prompts=settings.max_prompts,
        )
        redis = connect(settings.queue_url)
        stack.push_async_callback(redis.aclose)
        keys = Keys(model.name)
        queue = Queue(redis, keys)
        preprocess = await stack.enter_async_context(Directory(redis, keys, "preprocess"))
        decoder = await stack.enter_async_context(Directory(redis, keys, "decoder"))
        needed = {"preprocess": preprocess, "decoder": decoder}
        if model.has_vision and not settings.language_model_only:
            encoder = Directory(redis, keys, "vision_encoder")
            needed["vision encoder"] = await stack.enter_async_context(encoder)
        health = await stack.enter_async_context(Health(queue, needed))
        slices = Slices()
        follower = await stack.enter_async_context(
            Follower(queue, TokenChannel(redis, keys), slices)
        )
        await stack.enter_async_context(TenantWeights(queue, weights))
        pool = PreprocessPool(preprocess, limit)
        stack.push_async_callback(pool.close)
        instance_id = new_instance_id()
        metrics = Metrics(model.name, model.max_model_len)
        reporter = await stack.enter_async_context(Reporter(queue, metrics.load, instance_id))
        limits = QueueLimits(settings.max_waiting_requests, settings.max_waiting_tokens)
        cancels = Cancels(queue)
        stack.push_async_callback(cancels.settled)
        held_requests = await stack.enter_async_context(
            HeldRequests(queue, follower, cancels, metrics)
        )
        resumption = Resumption(model, queue, follower, held_requests, metrics)
        admission = Admission(
            model,
            queue,
            pool,
            follower,
            held_requests,
            cancels,
            resumption,
            metrics,
            limits,
            shares_prefixes=settings.share_prefix_cache or not settings.api_keys,
        )

        body_limits = BodyLimits(settings.max_body_bytes, settings.request_body_timeout, budget)
        answer_limits = AnswerLimits(settings.max_answer_bytes, settings.max_answer_bytes_in_flight)
        timeouts = Timeouts.of_seconds(
            settings.queue_timeout, settings.first_token_timeout, settings.request_timeout
        )
        generating = Generating(model, admission, metrics, body_limits, answer_limits, timeouts)
        information = Information(health, metrics, reporter, lambda: len(follower))
        parts = ServedParts(queue)
        app = App(
            [
                OpenAiEndpoint(
                    Completions(generating),
                    Models(model, parts),
                    Tokenizing(model, pool, body_limits, slices),
                ),
                TesseraEndpoint(Requests(resumption, make_writer), information),
            ],
            api_keys,
            CrossOrigin(settings.web_origins),
            Hosts(settings.host, has_keys=bool(settings.api_keys), allowed=settings.hosts),
            metrics.http,
            keys.tag,
        )
        grpc_server.add(
            _SERVICE,
            chat_pb2_grpc.add_ChatServiceServicer_to_server,
            ChatServicer(model, parts, admission, resumption, metrics, api_keys, timeouts),
        )
        settle()
        http_server.start(app)
        await grpc_server.ready(also=lambda: not health.missing())
        url = f"{'https' if tls else 'http'}://{_join(settings.host, http_server.port)}"
        instance = Announcement(redis, keys, "gateway", instance_id, url)
        await stack.enter_async_context(instance)
        gateway = Gateway(url, grpc_server.address, model, admission, follower, health, http_server)
        try:
            yield gateway
        finally:
            health.drain()
            await grpc_server.not_ready()
            await instance.withdraw()
            await _drain(http_server, grpc_server, held_requests, settings.shutdown_timeout)


def _api_keys(settings: GatewaySettings) -> ApiKeys:
    """The keys that it was given. Raises InvalidRequest if it needs one and has none."""
    keys = settings.api_keys
    access.warn_of_open_key_file(settings.api_key_file)
    access.require_keys_or_loopback(
        keys,
        settings.published_host or settings.host,
        allow_unauthenticated=settings.allow_unauthenticated,
    )
    return ApiKeys(keys)


async def _until_told(stop: asyncio.Event, http_server: HttpServer) -> None:
    """Waits for `stop`. Raises Unavailable if the REST server stops before."""
    stopping = asyncio.create_task(stop.wait())
    serving = asyncio.create_task(http_server.served())
    try:
        await asyncio.wait([stopping, serving], return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
    finally:
        await tasks.end(stopping, serving)


def _http_limits(settings: GatewaySettings) -> HttpLimits:
    return HttpLimits(
        head_bytes=settings.max_header_bytes,
        head_fields=settings.max_header_count,
        head_s=settings.request_header_timeout,
        keep_alive_s=settings.keep_alive_timeout,
        connections=connections_within_limits(settings.max_connections),
    )


def _grpc_limits(settings: GatewaySettings) -> list[tuple[str, int]]:
    """Limits on peers whose keys have not been checked."""
    return [
        ("grpc.max_concurrent_streams", settings.max_concurrent_streams),
        ("grpc.max_allowed_incoming_connections", settings.max_connections),
        ("grpc.max_metadata_size", settings.max_header_bytes // 2),
        ("grpc.absolute_max_metadata_size", settings.max_header_bytes),
        ("grpc.server_handshake_timeout_ms", round(settings.request_header_timeout * 1000)),
        ("grpc.http2.settings_timeout", round(settings.request_header_timeout * 1000)),
        ("grpc.max_connection_idle_ms", _GRPC_IDLE_MS),
        # The window of a stream stays as it is: what is not read waits at the client.
        ("grpc.http2.bdp_probe", 0),
    ]


async def _drain(
    http_server: HttpServer, grpc_server: RpcServer, held_requests: HeldRequests, timeout_s: float
) -> None:
    """Lets open answers run for a while, then closes them. Their requests are not cancelled: other
    gateways go on with them.
    """

    def close() -> None:
        held_requests.is_closing = True

    timer = asyncio.get_running_loop().call_later(timeout_s - _EARLIER_S, close)
    if timeout_s <= _EARLIER_S:
        close()
    try:
        await asyncio.gather(http_server.stop(), grpc_server.grpc.stop(timeout_s))
    finally:
        timer.cancel()
        close()


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
