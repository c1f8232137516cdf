"""Tessera's own REST API: requests by name, and what operators and balancers ask."""

from collections.abc import Sequence

from services.gateway.admission.api_keys import BEARER
from services.gateway.api.error_object import error_reply
from services.gateway.api.parts import Api, Parts
from services.gateway.api.tessera.front_end import FrontEnd
from services.gateway.api.tessera.grpc_adapters import AdapterServicer
from services.gateway.api.tessera.grpc_chat import ChatServicer
from services.gateway.api.tessera.grpc_vectors import VectorServicer
from services.gateway.api.tessera.information import Information
from services.gateway.api.tessera.requests import Requests
from services.gateway.http.endpoint import Route
from services.gateway.http.forms import ErrorReply
from shared.errors import ServingError
from shared.net.rpc.server import RpcServer
from tessera.gateway.v1 import (
    adapters_pb2,
    adapters_pb2_grpc,
    chat_pb2,
    chat_pb2_grpc,
    vectors_pb2,
    vectors_pb2_grpc,
)

_USER = {"user": "the `user` of the request, where the server has no keys"}
_AFTER = {
    "after": "the id of an event: those behind it come; the header Last-Event-ID says the same"
}
_CHAT = chat_pb2.DESCRIPTOR.services_by_name["ChatService"].full_name
_ADAPTERS = adapters_pb2.DESCRIPTOR.services_by_name["AdapterService"].full_name
_VECTORS = vectors_pb2.DESCRIPTOR.services_by_name["VectorService"].full_name


class TesseraEndpoint:
    """Requests that exist, health, load, metrics, version, the state of the system, and the pages for people."""

    roots = ("/v1/requests", "/v1/system", "/health", "/page")
    key_headers = (BEARER,)

    def __init__(self, requests: Requests, information: Information, pages: FrontEnd) -> None:
        ready, live = information.ready, information.live
        self.routes: Sequence[Route] = (
            Route("GET", "/v1/requests/*", requests.state, query=_USER),
            Route("DELETE", "/v1/requests/*", requests.cancel, query=_USER),
            Route("GET", "/v1/requests/*/timeline", requests.timeline, query=_USER),
            Route("GET", "/v1/requests/*/stream", requests.stream, query={**_USER, **_AFTER}),
            Route("GET", "/health", ready, needs_key=False, is_probe=True),
            Route("GET", "/health/ready", ready, needs_key=False, is_probe=True),
            Route("GET", "/health/live", live, needs_key=False, is_probe=True),
            Route("GET", "/ping", ready, needs_key=False, is_probe=True),
            Route("POST", "/ping", ready, needs_key=False, is_probe=True),
            Route("GET", "/v1/system", information.system),
            # Scrapers and the pages themselves carry no key.
            Route("GET", "/", pages.chat, needs_key=False),
            Route("GET", "/system", pages.system, needs_key=False),
            Route("GET", "/page/**", pages.part, needs_key=False),
            Route("GET", "/load", information.load, needs_key=False),
            Route("GET", "/metrics", information.metrics, needs_key=False),
            Route("GET", "/version", information.version, needs_key=False),
        )

    def error(self, error: ServingError) -> ErrorReply:
        """In OpenAI's form."""
        return error_reply(error)


def _endpoint(parts: Parts) -> TesseraEndpoint:
    follower = parts.follower
    information = Information(
        parts.health,
        parts.metrics,
        parts.reporter,
        lambda: len(follower),
        parts.system_state,
        parts.model,
        parts.body_limits.most_bytes,
    )
    requests = Requests(parts.resumption, parts.timelines, parts.reply_forms.make_writer)
    return TesseraEndpoint(requests, information, FrontEnd())


def _add_grpc(server: RpcServer, parts: Parts) -> None:
    generating = parts.grpc_generating
    chat = ChatServicer(parts.model, parts.served_parts, parts.resumption, generating)
    server.add(_CHAT, chat_pb2_grpc.add_ChatServiceServicer_to_server, chat)
    vectors = VectorServicer(parts.pooling, parts.grpc_pooling)
    server.add(_VECTORS, vectors_pb2_grpc.add_VectorServiceServicer_to_server, vectors)
    adapters = AdapterServicer(parts.model, parts.adapters, generating)
    server.add(_ADAPTERS, adapters_pb2_grpc.add_AdapterServiceServicer_to_server, adapters)


TESSERA = Api(_endpoint, add_grpc=_add_grpc)
