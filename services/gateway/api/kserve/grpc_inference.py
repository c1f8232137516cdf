"""inference.GRPCInferenceService: what is served, and answers by tensors."""

from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from typing import Any

import grpc

from inference import inference_pb2_grpc
from inference.inference_pb2 import (
    InferParameter,
    ModelInferRequest,
    ModelInferResponse,
    ModelMetadataRequest,
    ModelMetadataResponse,
    ModelReadyRequest,
    ModelReadyResponse,
    ModelStreamInferResponse,
    ServerLiveRequest,
    ServerLiveResponse,
    ServerMetadataRequest,
    ServerMetadataResponse,
    ServerReadyRequest,
    ServerReadyResponse,
)
from services.gateway.api.grpc_methods.calls import until_done
from services.gateway.api.grpc_methods.generating import GrpcGenerating, Read
from services.gateway.api.kserve.grpc_requests import Call, check_version, read_message
from services.gateway.api.kserve.infer import WantedOutput, output_tensor
from services.gateway.api.kserve.information import EXTENSIONS, INPUTS, OUTPUTS, PLATFORM, dims
from services.gateway.api.kserve.schema import VERSION
from services.gateway.api.kserve.tensors import to_bytes
from services.gateway.decoding.bounds import wrong
from services.gateway.endings import end_name
from services.gateway.following.answer import Answer
from services.gateway.health import Health
from services.gateway.model.served_model import ServedModel
from services.gateway.release import release
from shared.errors import NotFound, ServingError
from tessera.common.v1.ending_pb2 import Ending

_FINAL = "triton_final_response"
Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer(inference_pb2_grpc.GRPCInferenceServiceServicer):
    """Its errors are those of HTTP, as statuses; those of one prompt in a stream stand in its response."""

    def __init__(self, model: ServedModel, health: Health, generating: GrpcGenerating) -> None:
        self._model = model
        self._health = health
        self._generating = generating

    async def ServerLive(self, request: ServerLiveRequest, context: Context) -> ServerLiveResponse:
        """This process answers."""
        return ServerLiveResponse(live=True)

    async def ServerReady(
        self, request: ServerReadyRequest, context: Context
    ) -> ServerReadyResponse:
        """Whether it can serve."""
        return ServerReadyResponse(ready=not self._health.missing())

    async def ModelReady(self, request: ModelReadyRequest, context: Context) -> ModelReadyResponse:
        """Whether it can serve a model."""
        try:
            self._check(request.name, request.version)
        except NotFound:
            return ModelReadyResponse(ready=False)
        return ModelReadyResponse(ready=not self._health.missing())

    async def ServerMetadata(
        self, request: ServerMetadataRequest, context: Context
    ) -> ServerMetadataResponse:
        """What the server is."""
        return ServerMetadataResponse(name=PLATFORM, version=release(), extensions=EXTENSIONS)

    async def ModelMetadata(
        self, request: ModelMetadataRequest, context: Context
    ) -> ModelMetadataResponse:
        """The tensors of the model, or of an adapter. Raises NotFound."""
        self._check(request.name, request.version)
        about = ModelMetadataResponse.TensorMetadata
        inputs, outputs = (
            [about(name=name, datatype=kind, shape=dims(name)) for name, kind in some]
            for some in (INPUTS, OUTPUTS)
        )
        return ModelMetadataResponse(
            name=request.name,
            versions=[VERSION],
            platform=PLATFORM,
            inputs=inputs,
            outputs=outputs,
        )

    async def ModelInfer(self, request: ModelInferRequest, context: Context) -> ModelInferResponse:
        """One prompt, one response."""
        with until_done(context) as held:
            answer, call = await self._accept(request, "ModelInfer", context, held)
            return await _whole(answer, call.wanted)

    async def ModelStreamInfer(
        self, requests: AsyncIterator[ModelInferRequest], context: Context
    ) -> AsyncIterator[ModelStreamInferResponse]:
        """Prompts one after another."""
        async for request in requests:
            try:
                async for response in self._stream(request, context):
                    yield ModelStreamInferResponse(infer_response=response)
            except ServingError as error:
                failed = ModelInferResponse(id=request.id, model_name=request.model_name)
                failed.parameters[_FINAL].CopyFrom(InferParameter(bool_param=True))
                yield ModelStreamInferResponse(error_message=error.message, infer_response=failed)

    async def _stream(
        self, request: ModelInferRequest, context: Context
    ) -> AsyncIterator[ModelInferResponse]:
        with until_done(context) as held:
            answer, call = await self._accept(request, "ModelStreamInfer", context, held)
            if call.request.stream:
                async for response, is_last in _parts(answer, call.wanted):
                    yield _marked(response, is_last)
            else:
                yield _marked(await _whole(answer, call.wanted), True)

    async def _accept(
        self, request: ModelInferRequest, method: str, context: Context, held: ExitStack
    ) -> tuple[Answer, Call]:
        """An answer that `held` closes."""
        found: list[Call] = []

        def read() -> Read:
            call = read_message(request, self._model)
            if call.request.stream and method == "ModelInfer":
                raise wrong("stream", "cannot be true here: call ModelStreamInfer")
            found.append(call)
            return call.request, call.options

        answer = await self._generating.accept(request, read, method, context, held)
        held.callback(answer.close)
        return answer, found[0]

    def _check(self, name: str, version: str) -> None:
        self._model.check_name(name)
        check_version(version)


async def _whole(answer: Answer, wanted: Sequence[WantedOutput]) -> ModelInferResponse:
    [outcome] = await answer.whole()
    text = answer.head.reply.prompt_text + outcome.text
    return _response(answer, wanted, text, answer.token_ids(0), outcome.ending)


async def _parts(
    answer: Answer, wanted: Sequence[WantedOutput]
) -> AsyncIterator[tuple[ModelInferResponse, bool]]:
    """A response for each part of the text with its tokens, and whether it is the last."""
    before, ids = answer.head.reply.prompt_text, list[int]()
    while not answer.ended:
        for piece in await answer.next():
            ids += piece.token_ids
            is_last = piece.ending is not None
            if piece.text or is_last:
                text = before + piece.text
                yield _response(answer, wanted, text, ids, piece.ending), is_last
                before, ids = "", []


def _marked(response: ModelInferResponse, is_last: bool) -> ModelInferResponse:
    response.parameters[_FINAL].CopyFrom(InferParameter(bool_param=is_last))
    return response


def _response(
    answer: Answer,
    wanted: Sequence[WantedOutput],
    text: str,
    ids: Sequence[int],
    ending: Ending | None,
) -> ModelInferResponse:
    """The outputs of a text and its tokens, which may be a part of the answer."""
    response = ModelInferResponse(
        model_name=answer.head.model, model_version=VERSION, id=answer.head.reply.client_id
    )
    reason = "" if ending is None else end_name(ending)
    for one in wanted:
        tensor = output_tensor(one, text, ids, reason)
        response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        response.raw_output_contents.append(to_bytes(tensor))
    return response
