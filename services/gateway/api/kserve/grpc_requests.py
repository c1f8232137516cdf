"""Messages of the gRPC service as tensors and parameters."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from inference.inference_pb2 import InferParameter, ModelInferRequest
from services.gateway.api.kserve.infer import MOST_TENSORS, WantedOutput, wanted_outputs
from services.gateway.api.kserve.requests import read_infer
from services.gateway.api.kserve.schema import (
    VERSION,
    GrpcParameters,
    InputParameters,
    OutputTensor,
)
from services.gateway.api.kserve.tensors import Tensor, from_bytes, from_values
from services.gateway.decoding.bounds import at_most, text, wrong
from services.gateway.decoding.decode import convert
from services.gateway.model.served_model import ServedModel
from services.gateway.reading.options import GenerationOptions
from services.gateway.reading.valid_request import ValidRequest
from shared.errors import NotFound

_LONGEST_NAME = 256
# The list in which values of a datatype stand.
_CONTENTS: Mapping[str, str] = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip


class Call(NamedTuple):
    """A request, the options that it was made of, and the outputs that are asked for."""

    request: ValidRequest
    options: GenerationOptions
    wanted: Sequence[WantedOutput]


class _Message(msgspec.Struct):
    parameters: GrpcParameters | None = None


class _Input(msgspec.Struct):
    parameters: InputParameters | None = None


def read_message(message: ModelInferRequest, model: ServedModel) -> Call:
    """One message. Raises InvalidRequest naming the field, or NotFound."""
    check_version(message.model_version)
    if not message.inputs:
        raise wrong("inputs", "must hold at least one tensor")
    at_most("inputs", len(message.inputs), MOST_TENSORS)
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise wrong("raw_input_contents", "must hold one entry for each input, or none")
    tensors = [
        _tensor(given, raw[index] if raw else None) for index, given in enumerate(message.inputs)
    ]
    parameters = [
        *(convert({"parameters": _values(given.parameters)}, _Input).parameters for given in message.inputs),
        convert({"parameters": _values(message.parameters)}, _Message).parameters,
    ]  # fmt: skip
    name = message.model_name
    asked = read_infer(tensors, parameters, name, message.id, None, model)
    outputs = [OutputTensor(name=output.name) for output in message.outputs]
    wanted = wanted_outputs(outputs, asked.by_ids, binary=True)
    return Call(asked.request, asked.options, wanted)


def check_version(version: str) -> None:
    """Raises NotFound for a version that there is not; empty is the only one."""
    if version not in ("", VERSION):
        raise NotFound(
            "MODEL_NOT_FOUND", f"the model has version {VERSION} alone, not {version[:32]!r}"
        )


def _tensor(given: ModelInferRequest.InferInputTensor, raw: bytes | None) -> Tensor:
    name = text("inputs.name", given.name, _LONGEST_NAME)
    if not name:
        raise wrong("inputs", "must all have a name")
    shape = list(given.shape)
    if raw is not None:
        return from_bytes(name, given.datatype, shape, raw)
    values: Sequence[Any] = getattr(given.contents, _CONTENTS.get(given.datatype, "bytes_contents"))
    return from_values(name, given.datatype, shape, list(values))


def _values(parameters: Mapping[str, InferParameter]) -> dict[str, Any]:
    values = {}
    for name, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        values[name] = None if kind is None else getattr(parameter, kind)
    return values
