"""The bodies of MindIE's requests and replies. Fields that are not listed are refused by their names."""

from typing import Annotated

import msgspec

from services.gateway.decoding.about import REFUSED, about
from services.gateway.decoding.decode import Whole
from services.gateway.reading.prompt_parts import PromptText


class Parameters(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How to generate; None is the default."""

    max_new_tokens: Annotated[Whole | None, about("as `max_tokens`", "20")] = None
    do_sample: Annotated[bool | None, about("false takes the likeliest tokens", "true")] = None
    temperature: float | None = None
    top_k: Whole | None = None
    top_p: float | None = None
    seed: Whole | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Whole] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    priority: Whole | None = None
    timeout: float | None = None
    max_window_size: Annotated[
        Whole | None,
        about("a prompt of so many tokens or more is refused; 0 is no limit", "0", minimum=0),
    ] = None
    details: Annotated[
        bool | None, about("`finish_reason`, `generated_tokens` and `seed`", "false")
    ] = None
    # Of the batch that MindIE makes, and of measurements. Without effect.
    batch_size: Annotated[Whole | None, about("accepted, without effect")] = None
    perf_stat: Annotated[bool | None, about("accepted, without effect")] = None
    # Not taken, but for what means "off".
    typical_p: Annotated[float | None, about("1")] = None
    watermark: Annotated[bool | None, REFUSED] = None
    adapter_id: Annotated[str | None, about("name of an adapter", "none")] = None


class InferRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /infer: what follows a text or parts (`inputs`), or token ids (`input_id`)."""

    inputs: Annotated[PromptText | None, about("a text, or parts", example="What is there?")] = None
    input_id: Annotated[list[Whole] | None, about("token ids, in place of `inputs`")] = None
    stream: bool | None = None
    parameters: Annotated[Parameters | None, about("how to generate")] = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/tokenizer: a text."""

    inputs: Annotated[str | None, about("a text", example="What is there?")] = None
    do_decode: Annotated[bool | None, about("false: ids in place of texts", "true")] = None


class TokenizeReply(msgspec.Struct, kw_only=True):
    """The tokens of a text: each as text, or as its id."""

    token_number: int
    tokens: list[str | int]


class StopRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v2/models/{model}/stopInfer: which request."""

    id: Annotated[str | None, about("the `id` of the request's body, or the server's own")] = None


class StopReply(msgspec.Struct, kw_only=True):
    """The request that was told to end."""

    id: str
