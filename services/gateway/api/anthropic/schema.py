"""The bodies of Anthropic's requests and replies. What is not listed is refused by its name."""

import msgspec

from services.gateway.decoding.decode import Whole

_NONE = msgspec.Raw()


class _Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A part of a body."""

    def __post_init__(self) -> None:
        """Does nothing: that Python is called at all lets other threads run while a large body is decoded."""


class Source(_Body):
    """Where a picture is."""

    type: str | None = None
    media_type: str | None = None
    data: str | None = None  # a file in base64
    url: str | None = None


class Block(_Body):
    """One block of content; `type` says which fields are read."""

    type: str | None = None
    text: str | None = None
    source: Source | None = None
    # Of a call, and of what it gave.
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = _NONE
    tool_use_id: str | None = None
    content: "str | list[Block] | None" = None
    is_error: bool | None = None
    # What the model thought.
    thinking: str | None = None
    signature: str | None = None
    # Without effect: what is computed of equal prompts is kept anyway; who made a call.
    cache_control: msgspec.Raw = _NONE
    caller: msgspec.Raw = _NONE
    # Taken with null alone.
    citations: msgspec.Raw = _NONE
    toolset_name: msgspec.Raw = _NONE


class Turn(_Body):
    """One message."""

    role: str | None = None
    content: str | list[Block] | None = None


class Tool(_Body):
    """A tool that the client runs."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: msgspec.Raw = _NONE
    strict: bool | None = None
    # Without effect.
    cache_control: msgspec.Raw = _NONE
    eager_input_streaming: bool | None = None


class ToolChoice(_Body):
    """Whether tools are called."""

    type: str | None = None
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(_Body):
    """Whether the model thinks before it answers."""

    type: str | None = None
    budget_tokens: Whole | None = None
    display: str | None = None


class OutputFormat(_Body):
    """The form of the answer."""

    type: str | None = None
    schema: msgspec.Raw = _NONE


class OutputConfig(_Body):
    """How hard to think, and the form of the answer."""

    effort: str | None = None
    format: OutputFormat | None = None


class Metadata(_Body):
    """About the request."""

    user_id: str | None = None


class CountBody(_Body):
    """POST /v1/messages/count_tokens."""

    model: str | None = None
    messages: list[Turn] | None = None
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: msgspec.Raw = _NONE  # without effect


class MessagesBody(CountBody):
    """POST /v1/messages."""

    max_tokens: Whole | None = None
    metadata: Metadata | None = None
    service_tier: str | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: Whole | None = None
    top_p: float | None = None


class TokenCount(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens."""

    input_tokens: int
