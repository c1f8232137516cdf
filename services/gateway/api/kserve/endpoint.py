"""The routes below /v2."""

from collections.abc import Sequence
from dataclasses import replace

from inference import inference_pb2, inference_pb2_grpc
from services.gateway.admission.api_keys import BEARER
from services.gateway.admission.caller import Caller
from services.gateway.admission.request_options import RequestOptions
from services.gateway.api.generating import Generating
from services.gateway.api.kserve.grpc_inference import InferenceServicer
from services.gateway.api.kserve.infer import WantedOutput, infer_reply, read_body, wanted_outputs
from services.gateway.api.kserve.information import Information
from services.gateway.api.kserve.replies import TextWriter, error_reply, whole
from services.gateway.api.kserve.requests import ReadRequest, read_generate, read_infer, urls
from services.gateway.api.kserve.schema import (
    VERSION,
    GenerateRequest,
    InferRequest,
    ModelReply,
    ServerReply,
)
from services.gateway.api.parts import Api, Parts
from services.gateway.decoding.bounds import wrong
from services.gateway.following.answer import Answer
from services.gateway.http.endpoint import ReplyForm, Route
from services.gateway.http.exchange import Exchange
from services.gateway.http.forms import ErrorReply
from services.gateway.http.streams import write_stream
from services.gateway.reading.media.data_urls import DecodedBody, InlineMedia, decode_with_media
from services.gateway.reading.valid_request import ValidRequest
from shared.errors import ServingError
from shared.net.rpc.server import RpcServer
from tessera.scheduler.v1.queue_pb2 import ReplyKind

_SERVICE = inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
_BINARY = "application/octet-stream"
_TAILS = ("generate", "generate_stream", "infer", "ready", "config")


class KserveEndpoint:
    """Health, metadata, and the three ways to generate. The one version of the model may be named."""

    roots = ("/v2",)
    key_headers = (BEARER,)

    def __init__(self, generating: Generating, information: Information) -> None:
        self._generating = generating
        about = information
        live = Route("GET", "/v2/health/live", about.live, needs_key=False, is_probe=True)
        ready = Route("GET", "/v2/health/ready", about.ready, needs_key=False, is_probe=True)
        server = Route("GET", "/v2", about.server, reply=ServerReply)
        of_model = [
            Route("GET", "", about.model, reply=ModelReply),
            Route("GET", "/ready", about.model_ready),
            Route("GET", "/config", about.config),
            Route("POST", "/generate", self._generate, GenerateRequest, generates=True),
            Route("POST", "/generate_stream", self._stream, GenerateRequest, generates=True),
            Route("POST", "/infer", self._infer, InferRequest, generates=True),
        ]
        self.routes: Sequence[Route] = (
            live,
            ready,
            server,
            *(
                replace(route, path=f"/v2/models/*{version}{route.path}")
                for route in of_model
                for version in ("", f"/versions/{VERSION}")
            ),
        )

    def error(self, error: ServingError) -> ErrorReply:
        """{"error": "text"}."""
        return error_reply(error)

    async def _generate(self, exchange: Exchange, caller: Caller) -> None:
        """POST /v2/models/{model}/generate: what follows a text."""
        await self._generating.answer(exchange, caller, self._read_whole, _write)

    async def _stream(self, exchange: Exchange, caller: Caller) -> None:
        """POST /v2/models/{model}/generate_stream: the same as a stream."""
        await self._generating.answer(exchange, caller, self._read_stream, _write)

    async def _infer(self, exchange: Exchange, caller: Caller) -> None:
        """POST /v2/models/{model}/infer: the same from and as tensors."""
        call = _InferCall(self._generating)
        await self._generating.answer(
            exchange, caller, call.read, call.write, more_kinds=(_BINARY,)
        )

    def _read_whole(
        self, exchange: Exchange, body: bytes
    ) -> tuple[list[ValidRequest], RequestOptions]:
        return self._read(exchange, body, False)

    def _read_stream(
        self, exchange: Exchange, body: bytes
    ) -> tuple[list[ValidRequest], RequestOptions]:
        return self._read(exchange, body, True)

    def _read(
        self, exchange: Exchange, body: bytes, stream: bool
    ) -> tuple[list[ValidRequest], RequestOptions]:
        decoded = decode_with_media(body, GenerateRequest, urls)
        asked = read_generate(
            decoded.content, model_of(exchange.path), stream, self._generating.model
        )
        found = DecodedBody(asked.options, decoded.json, decoded.media)
        request = replace(asked.request, inline_media=decoded.media)
        return [request], self._generating.read_options(exchange, found)


class _InferCall:
    """One call of /infer: what its reply is made of is known once its body is read."""

    def __init__(self, generating: Generating) -> None:
        self._generating = generating
        self._wanted: Sequence[WantedOutput] = ()

    def read(self, exchange: Exchange, body: bytes) -> tuple[list[ValidRequest], RequestOptions]:
        found = read_body(body, exchange.header("inference-header-content-length"))
        content = found.content
        # Triton's parameters of the request count before MindIE's, which stand in an input.
        parameters = [*(given.parameters for given in content.inputs or ()), content.parameters]
        asked: ReadRequest = read_infer(
            found.tensors,
            parameters,
            model_of(exchange.path),
            content.id,
            None,
            self._generating.model,
        )
        if asked.request.stream:
            raise wrong("parameters.stream", "cannot be true here: POST to /generate_stream")
        given = content.parameters
        binary = given is not None and given.binary_data_output is True
        self._wanted = wanted_outputs(content.outputs, asked.by_ids, binary)
        options = DecodedBody(asked.options, found.json, InlineMedia())
        return [asked.request], self._generating.read_options(exchange, options)

    async def write(
        self, exchange: Exchange, answers: Sequence[Answer], stream: bool, with_ids: bool
    ) -> None:
        [answer] = answers
        [outcome] = await answer.whole()
        body, header = infer_reply(answer, outcome, self._wanted)
        if header is None:
            await exchange.respond(200, body)
            return
        length = (b"inference-header-content-length", b"%d" % header)
        await exchange.respond(200, body, _BINARY.encode(), [length])


def model_of(path: str) -> str:
    """The name of the model in a path below /v2/models, which may have slashes."""
    name, _, tail = path.removeprefix("/v2/models/").rpartition("/")
    if tail not in _TAILS:
        return path.removeprefix("/v2/models/").removesuffix(f"/versions/{VERSION}")
    return name.removesuffix(f"/versions/{VERSION}")


async def _write(
    exchange: Exchange, answers: Sequence[Answer], stream: bool, with_ids: bool
) -> None:
    [answer] = answers
    if stream:
        await write_stream(exchange, answers, [TextWriter(answer, with_ids)])
        return
    [outcome] = await answer.whole()
    await exchange.respond(200, whole(answer, outcome))


def _endpoint(parts: Parts) -> KserveEndpoint:
    information = Information(parts.model, parts.health, model_of)
    return KserveEndpoint(parts.generating, information)


def _add_grpc(server: RpcServer, parts: Parts) -> None:
    servicer = InferenceServicer(parts.model, parts.health, parts.grpc_generating)
    register = inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server
    server.add(_SERVICE, register, servicer)


KSERVE = Api(_endpoint, {ReplyKind.REPLY_KIND_TRITON: ReplyForm(TextWriter)}, _add_grpc)
