"""The bodies of TGI's requests and replies. Fields of requests that are not listed are ignored, as TGI does."""

from typing import Annotated

import msgspec

from services.gateway.decoding.about import Refused, about
from services.gateway.decoding.decode import Whole
from services.gateway.reading.prompt_parts import PromptText

_NONE = msgspec.Raw()


class Grammar(msgspec.Struct, kw_only=True):
    """`parameters.grammar`: `type` says what `value` is."""

    type: Annotated[str | None, about("json, json_schema or regex")] = None
    value: Annotated[
        msgspec.Raw, about("a schema; of json_schema an object with it; of regex an expression")
    ] = _NONE


class NamedSchema(msgspec.Struct, kw_only=True):
    """The value of a grammar of the type "json_schema"."""

    name: Annotated[str | None, about("without effect")] = None
    schema: Annotated[msgspec.Raw, about("the schema")] = _NONE


class Parameters(msgspec.Struct, kw_only=True):
    """How to generate, under TGI's names; None is the default."""

    best_of: Annotated[
        Whole | None, about("candidates of which the best one is given; not with streams", "1")
    ] = None
    decoder_input_details: Annotated[
        bool | None, about("with `details`: the prompt's tokens; not with streams", "false")
    ] = None
    details: Annotated[
        bool | None,
        about("tokens with log-probabilities, `finish_reason`, `seed`, counts", "false"),
    ] = None
    do_sample: Annotated[
        bool | None,
        about(
            "without it, and without `temperature`, `top_k` and `top_p`, the likeliest tokens are taken",
            "false",
        ),
    ] = None
    frequency_penalty: float | None = None
    grammar: Annotated[
        Grammar | None,
        about(
            '`{"type": ..., "value": ...}`, the form of the answer: `json` with a schema, `json_schema` with `{"name":'
            ' ..., "schema": ...}`, `regex` with an expression',
            "none",
        ),
    ] = None
    max_new_tokens: Annotated[Whole | None, about("as `max_tokens`", "100")] = None
    repetition_penalty: float | None = None
    return_full_text: Annotated[bool | None, about("the prompt before the answer", "false")] = None
    seed: Whole | None = None
    stop: Annotated[
        list[str] | None,
        about("up to 16 texts that end the answer; what was found stays in it", "none"),
    ] = None
    stop_sequences: Annotated[list[str] | None, about("the older name of `stop`")] = None
    temperature: Annotated[float | None, about("above 0, to 2", "checkpoint (1)")] = None
    top_k: Whole | None = None
    top_n_tokens: Annotated[
        Whole | None, about("with `details`: so many of the likeliest tokens", "none")
    ] = None
    top_p: float | None = None
    truncate: Annotated[Whole | None, about("keeps so many tokens of the prompt's end", "all")] = (
        None
    )
    typical_p: Annotated[float | None, about("1, which is off")] = None
    adapter_id: Annotated[str | None, about("name of an adapter", "none")] = None
    # Not taken, but for what means "off".
    watermark: Refused = _NONE


class GenerateRequest(msgspec.Struct, kw_only=True):
    """POST /, /generate and /generate_stream: what follows a text. Images are `![](URL)` in `inputs`, or parts of a
    list, MindIE's way.
    """

    inputs: Annotated[
        PromptText | None,
        about("a text, in which pictures are ![](URL), or parts", example="What is there?"),
    ] = None
    parameters: Annotated[Parameters | None, about("how to generate")] = None
    # Of POST / alone.
    stream: Annotated[
        bool | None, about("of POST / alone: the answer comes as events", "false")
    ] = None
    model: str | None = None


class InfoReply(msgspec.Struct, kw_only=True):
    """GET /info: what is served, and its limits."""

    model_id: str
    model_sha: str | None = None
    model_pipeline_tag: str
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    validation_workers: int = 1
    max_client_batch_size: int = 1
    router: str = "tessera"
    version: str
    sha: str | None = None
    docker_label: str | None = None
