"""One gateway process: REST and gRPC over one admission, and the order in which it starts and stops."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import structlog

from services.gateway.admission.admission import Admission
from services.gateway.admission.held_requests import HeldRequests
from services.gateway.api.parts import Api
from services.gateway.apis import APIS
from services.gateway.following.follower import Follower
from services.gateway.health import Health
from services.gateway.http.server import HttpServer
from services.gateway.model.served_model import ServedModel
from services.gateway.open_parts import load_model, open_parts
from services.gateway.servers import (
    body_budget,
    http_limits,
    make_app,
    make_grpc_server,
    read_api_keys,
)
from services.gateway.settings import GatewaySettings
from services.gateway.telemetry.recent_errors import RecentErrors
from services.gateway.timings import USUAL, Timings
from shared import service_process
from shared.net import tasks
from shared.net.host_port import join
from shared.net.metrics_page import serve_metrics
from shared.net.rpc.server import RpcServer
from shared.net.server_tls import ServerTls
from shared.queue import connect
from shared.queue.keys import Keys, new_instance_id
from shared.queue.registry import Announcement

log = structlog.get_logger(__name__)

# The servers close what is open at the end of the shutdown timeout; from a little before that on, a
# closed answer is no client that has left.
_EARLIER_S = 0.1


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
    apis: Sequence[Api] = APIS,
    timings: Timings = USUAL,
) -> AsyncIterator[Gateway]:
    """Starts a gateway whose REST endpoints, those of `apis`, `http` serves, once it has called `settle`; leaving the
    block drains it within `shutdown_timeout`.

    Raises ServingError if an address is taken or the model cannot be read. Redis may be away: it is
    not ready then.
    """
    tls = ServerTls.of(settings)
    api_keys, budget = read_api_keys(settings), body_budget(settings)
    instance_id = new_instance_id()
    errors = RecentErrors(instance_id)
    async with contextlib.AsyncExitStack() as stack:
        # Addresses are taken before the model is loaded: it fails at once where it would later.
        grpc_server = await stack.enter_async_context(
            make_grpc_server(settings, tls, api_keys, budget, errors)
        )
        http_server = http(
            settings.host, settings.port, settings.shutdown_timeout, http_limits(settings), tls
        )
        stack.callback(http_server.unbind)
        model = await asyncio.to_thread(load_model, settings)
        redis = connect(settings.queue_url)
        stack.push_async_callback(redis.aclose)
        parts = await stack.enter_async_context(
            open_parts(settings, model, redis, instance_id, apis, api_keys, budget, errors, timings)
        )
        app = make_app(settings, parts, apis)
        for api in apis:
            if api.add_grpc is not None:
                api.add_grpc(grpc_server, parts)
        settle()
        page = partial(parts.reporter.page, parts.metrics)
        await stack.enter_async_context(serve_metrics(settings.metrics_listen, lambda: page))
        http_server.start(app)
        health = parts.health
        await grpc_server.ready(also=lambda: not health.missing())
        url = f"{'https' if tls else 'http'}://{join(settings.host, http_server.port)}"
        instance = Announcement(
            redis,
            Keys(model.name),
            "gateway",
            instance_id,
            url,
            load=lambda: {"open_answers": len(parts.follower), "body_bytes": budget.held},
        )
        await stack.enter_async_context(instance)
        try:
            yield Gateway(
                url,
                grpc_server.address,
                model,
                parts.admission,
                parts.follower,
                health,
                http_server,
            )
        finally:
            health.drain()
            await grpc_server.not_ready()
            await instance.withdraw()
            await _drain(http_server, grpc_server, parts.held_requests, settings.shutdown_timeout)


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
