"""The bodies of requests and replies. Fields that are not listed are refused by their names."""

from typing import Annotated

import msgspec

from services.gateway.decoding.about import REFUSED, about
from services.gateway.decoding.decode import Whole
from services.gateway.reading.prompt_parts import PromptText

_NONE = msgspec.Raw()
VERSION = "1"  # of the one model


class Parameters(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How to generate, under the names that Triton's backends and MindIE have; None is the default."""

    max_tokens: Annotated[
        Whole | None, about("1 to the model's length; with the prompt not above it", "16")
    ] = None
    max_new_tokens: Annotated[Whole | None, about("the same under another name", "16")] = None
    min_tokens: Whole | None = None
    do_sample: Annotated[bool | None, about("false takes the likeliest tokens", "true")] = None
    temperature: float | None = None
    top_k: Whole | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Whole | None = None
    random_seed: Annotated[Whole | None, about("the same as `seed`")] = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_words: Annotated[str | list[str] | None, about("the same as `stop`")] = None
    ignore_eos: bool | None = None
    priority: Whole | None = None
    timeout: float | None = None
    # What the reply has.
    stream: bool | None = None
    details: Annotated[bool | None, about("`finish_reason` and `generated_tokens`", "false")] = None
    exclude_input_in_output: Annotated[
        bool | None, about("false puts the prompt before the answer", "true")
    ] = None
    # MindIE's: of the batch that it makes, and of measurements. Without effect.
    batch_size: Annotated[Whole | None, about("accepted, without effect")] = None
    perf_stat: Annotated[bool | None, about("accepted, without effect")] = None
    # Not taken, but for what means "off".
    typical_p: Annotated[float | None, about("1")] = None
    watermark: Annotated[bool | None, REFUSED] = None


class GenerateRequest(Parameters, kw_only=True, forbid_unknown_fields=True):
    """POST /v2/models/{model}/generate and /generate_stream: parameters beside the text, or in `parameters`."""

    id: Annotated[str | None, about("a name of the request")] = None
    text_input: Annotated[
        PromptText | None, about("a text, or parts", example="What is there?")
    ] = None
    image: Annotated[
        str | list[str] | None,
        about(
            "one picture or several, which stand before a text: each a URL, a path, or a file in base64"
        ),
    ] = None
    parameters: Annotated[
        Parameters | None, about("parameters that do not stand beside the text")
    ] = None
    # The parameters as JSON in a string, as Triton's vLLM backend has them.
    sampling_parameters: Annotated[str | None, about("parameters as JSON in a string")] = None


class InferParameters(Parameters, kw_only=True, forbid_unknown_fields=True):
    """`parameters` of POST /v2/models/{model}/infer."""

    binary_data_output: Annotated[
        bool | None, about("outputs as bytes behind the JSON", "false")
    ] = None
    sequence_id: Annotated[Whole | str | None, REFUSED] = None
    sequence_start: Annotated[bool | None, about("accepted, without effect")] = None
    sequence_end: Annotated[bool | None, about("accepted, without effect")] = None


class GrpcParameters(InferParameters, kw_only=True, forbid_unknown_fields=True):
    """`parameters` of a message of gRPC."""

    # Every stream has a last response that says that it is the last.
    triton_enable_empty_final_response: bool | None = None


class InputParameters(Parameters, kw_only=True, forbid_unknown_fields=True):
    """`parameters` of one input; MindIE has those of the request there."""

    binary_data_size: Annotated[Whole | None, about("bytes of its values behind the JSON")] = None


class InputTensor(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One input. Its values are in `data`, or behind the JSON as bytes."""

    name: Annotated[
        str | None, about("text_input, image, a parameter, or any name of token ids")
    ] = None
    shape: Annotated[list[Whole] | None, about("its sides")] = None
    datatype: Annotated[str | None, about("such as BYTES or UINT32")] = None
    data: Annotated[
        msgspec.Raw, about("its values, where they do not stand behind the JSON as bytes")
    ] = _NONE
    parameters: Annotated[
        InputParameters | None, about("of this input; MindIE has those of the request there")
    ] = None


class OutputParameters(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`parameters` of one output."""

    binary_data: Annotated[bool | None, about("as bytes behind the JSON", "false")] = None


class OutputTensor(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One output that is asked for."""

    name: Annotated[str | None, about("text_output, finish_reason or output_ids")] = None
    parameters: Annotated[OutputParameters | None, about("of this output")] = None


class InferRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v2/models/{model}/infer."""

    id: Annotated[str | None, about("a name of the request")] = None
    inputs: Annotated[
        list[InputTensor] | None,
        about(
            "the prompt and parameters",
            example=[
                {
                    "name": "text_input",
                    "shape": [1],
                    "datatype": "BYTES",
                    "data": ["What is there?"],
                }
            ],
        ),
    ] = None
    outputs: Annotated[list[OutputTensor] | None, about("what the reply has", "the text")] = None
    parameters: Annotated[InferParameters | None, about("how to generate")] = None


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
