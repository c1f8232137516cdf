"""What a gateway listens with: its gRPC server, the limits of both servers, and the application over its APIs."""

from collections.abc import Sequence

from services.gateway.admission.api_keys import ApiKeys
from services.gateway.api.missing_routes import no_route
from services.gateway.api.parts import Api, Parts
from services.gateway.api.tessera.description.endpoint import DescriptionEndpoint
from services.gateway.api.tessera.grpc_limits import CallLimits
from services.gateway.body_budget import BodyBudget
from services.gateway.http.app import App
from services.gateway.http.connection.protocol import HttpLimits
from services.gateway.http.cross_origin import CrossOrigin
from services.gateway.http.endpoint import Endpoint
from services.gateway.http.hosts import Hosts
from services.gateway.http.open_files import connections_within_limits
from services.gateway.open_parts import message_limit
from services.gateway.settings import GatewaySettings
from services.gateway.telemetry.recent_errors import RecentErrors
from shared import access
from shared.net.host_port import join
from shared.net.rpc.server import RpcServer
from shared.net.server_tls import ServerTls
from shared.queue.keys import model_tag

_GRPC_IDLE_MS = 300_000


def read_api_keys(settings: GatewaySettings) -> ApiKeys:
    """The keys that it was given. Raises InvalidRequest if it needs one and has none."""
    keys = settings.api_keys
    access.warn_of_open_key_file(settings.api_key_file)
    access.require_keys_or_loopback(
        keys,
        settings.published_host or settings.host,
        allow_unauthenticated=settings.allow_unauthenticated,
    )
    return ApiKeys(keys)


def body_budget(settings: GatewaySettings) -> BodyBudget:
    """The budget of bodies for REST and gRPC together: at least two of the largest."""
    return BodyBudget(max(settings.max_body_bytes_in_flight, 2 * message_limit(settings)))


def make_grpc_server(
    settings: GatewaySettings,
    tls: ServerTls | None,
    api_keys: ApiKeys,
    budget: BodyBudget,
    errors: RecentErrors,
) -> RpcServer:
    """The server of the public gRPC API, which has no methods yet. `errors` are told of calls without a key."""
    limit = message_limit(settings)
    return RpcServer(
        join(settings.host, settings.grpc_port),
        credentials=tls.grpc_credentials() if tls else None,
        heartbeat=settings.heartbeat,
        max_message_bytes=limit,
        limits=_grpc_limits(settings),
        gate=CallLimits(api_keys, limit, budget, errors),
        grace_s=0.5,
        public=True,
    )


def make_app(settings: GatewaySettings, parts: Parts, apis: Sequence[Api]) -> App:
    """The application over the endpoints of `apis`, and one that describes them."""
    endpoints: list[Endpoint] = [api.make_endpoint(parts) for api in apis]
    endpoints.append(DescriptionEndpoint(endpoints, has_keys=bool(settings.api_keys)))
    app = App(
        endpoints,
        parts.api_keys,
        CrossOrigin(settings.web_origins),
        Hosts(settings.host, has_keys=bool(settings.api_keys), allowed=settings.hosts),
        parts.metrics.http,
        parts.refusals,
        model_tag(parts.model.name),
        no_route,
        parts.body_limits,
    )
    parts.inner_calls.open(app)
    return app


def http_limits(settings: GatewaySettings) -> HttpLimits:
    """Limits on connections of REST."""
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
