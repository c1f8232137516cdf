"""The bodies of requests for responses. What is not listed is refused by its name."""

import msgspec

from services.gateway.decoding.decode import Whole

_NONE = msgspec.Raw()


class _Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A part of a body."""

    def __post_init__(self) -> None:
        """Does nothing: that Python is called at all lets other threads run while a large body is decoded."""


class ContentPart(_Body):
    """One part of what an item says; `type` says which fields are read."""

    type: str | None = None
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: str | None = None
    # Of what a response said; without effect.
    annotations: msgspec.Raw = _NONE
    logprobs: msgspec.Raw = _NONE
    # Taken with null alone.
    file_id: msgspec.Raw = _NONE


class Item(_Body):
    """One item; `type` says which fields are read, and without it the item is a message."""

    type: str | None = None
    # Of a message, and of reasoning.
    role: str | None = None
    content: str | list[ContentPart] | None = None
    # Of a call, and of what it gave.
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None
    # Names that a response gave; without effect.
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    # Of reasoning: read where there is no content.
    summary: list[ContentPart] | None = None
    encrypted_content: str | None = None


class Reasoning(_Body):
    """How hard to think."""

    effort: str | None = None
    summary: str | None = None


class TextFormat(_Body):
    """The form of the answer."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    schema: msgspec.Raw = _NONE
    strict: bool | None = None


class TextConfig(_Body):
    """The form of the answer, and how long it is to be."""

    format: TextFormat | None = None
    verbosity: str | None = None


class StreamOptions(_Body):
    """What events have beside what they say; without effect: ours have nothing else."""

    include_obfuscation: bool | None = None


class KeptFields(msgspec.Struct, kw_only=True):
    """What of a body has to be known before the rest: what it goes on with, and what is kept of it."""

    previous_response_id: str | None = None
    user: str | None = None
    store: bool | None = None
    background: bool | None = None
    input: msgspec.Raw = _NONE


class KeptOutput(msgspec.Struct, kw_only=True):
    """What of a kept response the next one goes on with."""

    status: str
    output: list[Item]


class ResponseBody(_Body):
    """POST /v1/responses."""

    model: str | None = None
    input: str | list[Item] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: dict[str, str] | None = None
    include: list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # What the model may do, and how it answers.
    tools: msgspec.Raw = _NONE
    tool_choice: msgspec.Raw = _NONE
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    truncation: str | None = None
    # Which tokens, and how many.
    max_output_tokens: Whole | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Whole | None = None
    # Who asks, and with what urgency.
    user: str | None = None
    service_tier: str | None = None
    # Repeated, without effect: tools of the server's own, who asks, where to find what was computed.
    max_tool_calls: Whole | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    # As in chats; OpenAI has none of them.
    top_k: Whole | None = None
    min_p: float | None = None
    seed: Whole | None = None
    stop: str | list[str] | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    priority: Whole | None = None
    timeout: float | None = None
    cache_salt: str | None = None


class InputTokens(msgspec.Struct, kw_only=True):
    """POST /v1/responses/input_tokens."""

    object: str = "response.input_tokens"
    input_tokens: int
