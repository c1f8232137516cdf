"""The bodies of MindIE's requests and replies. Fields that are not listed are refused by their names."""

import msgspec

from services.gateway.decoding.decode import Whole
from services.gateway.reading.prompt_parts import PromptText


class Parameters(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How to generate; None is the default."""

    max_new_tokens: Whole | None = None
    do_sample: bool | None = None
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
    max_window_size: Whole | None = None
    details: bool | None = None
    # Of the batch that MindIE makes, and of measurements. Without effect.
    batch_size: Whole | None = None
    perf_stat: bool | None = None
    # Not taken, but for what means "off".
    typical_p: float | None = None
    watermark: bool | None = None
    adapter_id: str | None = None


class InferRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /infer: a text or parts as `inputs`, or token ids as `input_id`."""

    inputs: PromptText | None = None
    input_id: list[Whole] | None = None
    stream: bool | None = None
    parameters: Parameters | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/tokenizer."""

    inputs: str | None = None
    do_decode: bool | None = None


class TokenizeReply(msgspec.Struct, kw_only=True):
    """The tokens of a text: each as text, or as its id."""

    token_number: int
    tokens: list[str] | list[int]


class StopRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v2/models/{model}/stopInfer."""

    id: str | None = None


class StopReply(msgspec.Struct, kw_only=True):
    """The request that was told to end."""

    id: str
