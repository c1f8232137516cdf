"""The bodies of requests and replies. Fields that are not listed are refused by their names."""

import msgspec

from services.gateway.decoding.decode import Whole
from services.gateway.reading.prompt_parts import PromptText

_NONE = msgspec.Raw()
VERSION = "1"  # of the one model


class Parameters(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How to generate, under the names that Triton's backends and MindIE have; None is the default."""

    max_tokens: Whole | None = None
    max_new_tokens: Whole | None = None
    min_tokens: Whole | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: Whole | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Whole | None = None
    random_seed: Whole | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_words: str | list[str] | None = None
    ignore_eos: bool | None = None
    priority: Whole | None = None
    timeout: float | None = None
    # What the reply has.
    stream: bool | None = None
    details: bool | None = None
    exclude_input_in_output: bool | None = None
    # MindIE's: of the batch that it makes, and of measurements. Without effect.
    batch_size: Whole | None = None
    perf_stat: bool | None = None
    # Not taken, but for what means "off".
    typical_p: float | None = None
    watermark: bool | None = None


class GenerateRequest(Parameters, kw_only=True, forbid_unknown_fields=True):
    """POST /v2/models/{model}/generate and /generate_stream: parameters beside the text, or in `parameters`."""

    id: str | None = None
    text_input: PromptText | None = None
    parameters: Parameters | None = None
    # The parameters as JSON in a string, as Triton's vLLM backend has them.
    sampling_parameters: str | None = None


class InferParameters(Parameters, kw_only=True, forbid_unknown_fields=True):
    """`parameters` of POST /v2/models/{model}/infer."""

    binary_data_output: bool | None = None
    sequence_id: Whole | str | None = None
    sequence_start: bool | None = None
    sequence_end: bool | None = None


class GrpcParameters(InferParameters, kw_only=True, forbid_unknown_fields=True):
    """`parameters` of a message of gRPC."""

    # Every stream has a last response that says that it is the last.
    triton_enable_empty_final_response: bool | None = None


class InputParameters(Parameters, kw_only=True, forbid_unknown_fields=True):
    """`parameters` of one input; MindIE has those of the request there."""

    binary_data_size: Whole | None = None


class InputTensor(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One input. Its values are in `data`, or behind the JSON as bytes."""

    name: str | None = None
    shape: list[Whole] | None = None
    datatype: str | None = None
    data: msgspec.Raw = _NONE
    parameters: InputParameters | None = None


class OutputParameters(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`parameters` of one output."""

    binary_data: bool | None = None


class OutputTensor(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One output that is asked for."""

    name: str | None = None
    parameters: OutputParameters | None = None


class InferRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v2/models/{model}/infer."""

    id: str | None = None
    inputs: list[InputTensor] | None = None
    outputs: list[OutputTensor] | None = None
    parameters: InferParameters | None = None


class TensorAbout(msgspec.Struct, kw_only=True):
    """What is said of a tensor of the model."""

    name: str
    datatype: str
    shape: list[int]


class ModelReply(msgspec.Struct, kw_only=True):
    """GET /v2/models/{model}."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorAbout]
    outputs: list[TensorAbout]


class ServerReply(msgspec.Struct, kw_only=True):
    """GET /v2."""

    name: str
    version: str
    extensions: list[str]
