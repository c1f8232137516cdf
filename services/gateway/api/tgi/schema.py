"""The bodies of TGI's requests and replies. Fields of requests that are not listed are ignored, as TGI does."""

import msgspec

from services.gateway.decoding.decode import Whole
from services.gateway.reading.prompt_parts import PromptText

_NONE = msgspec.Raw()


class Grammar(msgspec.Struct, kw_only=True):
    """`parameters.grammar`: `type` says what `value` is."""

    type: str | None = None
    value: msgspec.Raw = _NONE


class NamedSchema(msgspec.Struct, kw_only=True):
    """The value of a grammar of the type "json_schema"."""

    name: str | None = None
    schema: msgspec.Raw = _NONE


class Parameters(msgspec.Struct, kw_only=True):
    """How to generate, under TGI's names; None is the default."""

    best_of: Whole | None = None
    decoder_input_details: bool | None = None
    details: bool | None = None
    do_sample: bool | None = None
    frequency_penalty: float | None = None
    grammar: Grammar | None = None
    max_new_tokens: Whole | None = None
    repetition_penalty: float | None = None
    return_full_text: bool | None = None
    seed: Whole | None = None
    stop: list[str] | None = None
    stop_sequences: list[str] | None = None  # as it used to be called
    temperature: float | None = None
    top_k: Whole | None = None
    top_n_tokens: Whole | None = None
    top_p: float | None = None
    truncate: Whole | None = None
    typical_p: float | None = None
    adapter_id: str | None = None  # an adapter's name
    # Not taken, but for what means "off".
    watermark: msgspec.Raw = _NONE


class GenerateRequest(msgspec.Struct, kw_only=True):
    """POST /, /generate and /generate_stream. Images are `![](URL)` in `inputs`, or parts of a list, MindIE's way."""

    inputs: PromptText | None = None
    parameters: Parameters | None = None
    # Of POST / alone.
    stream: bool | None = None
    model: str | None = None


class InfoReply(msgspec.Struct, kw_only=True):
    """GET /info."""

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
