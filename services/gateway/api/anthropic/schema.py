"""The bodies of Anthropic's requests and replies. What is not listed is refused by its name."""

from typing import Annotated

import msgspec

from services.gateway.decoding.about import Refused, about
from services.gateway.decoding.decode import Whole

_NONE = msgspec.Raw()


class _Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A part of a body."""

    def __post_init__(self) -> None:
        """Does nothing: that Python is called at all lets other threads run while a large body is decoded."""


class Source(_Body):
    """Where a picture is, or what a document says."""

    type: Annotated[
        str | None, about("of a picture base64, url or file, of a document text or content")
    ] = None
    media_type: Annotated[str | None, about("the file's type, such as image/png")] = None
    data: Annotated[str | None, about("a file in base64, or of text the text")] = None
    url: Annotated[str | None, about("a data:, http:, https: or file: URL")] = None
    content: Annotated["str | list[Block] | None", about("of content: a text, or blocks")] = None
    file_id: Annotated[str | None, about("of file: a file that was sent to /v1/files")] = None


class Block(_Body):
    """One block of content; `type` says which fields are read."""

    type: Annotated[
        str | None, about("text, image, document, search_result, tool_use, tool_result or thinking")
    ] = None
    text: Annotated[str | None, about("a text")] = None
    source: Annotated[
        Source | str | None,
        about("where a picture is, what a document says, where a search result is from"),
    ] = None
    # Of documents and search results: shown before what they say.
    title: Annotated[str | None, about("of a document or search result")] = None
    context: Annotated[str | None, about("of a document: what is said of it")] = None
    # Of a call, and of what it gave.
    id: Annotated[str | None, about("the name of a call")] = None
    name: Annotated[str | None, about("the tool that was called")] = None
    input: Annotated[msgspec.Raw, about("what it was called with: an object")] = _NONE
    tool_use_id: Annotated[str | None, about("the call that a result answers")] = None
    content: Annotated[
        "str | list[Block] | None",
        about("what a call gave: a text, or blocks of text and images; what a search found"),
    ] = None
    is_error: Annotated[bool | None, about("whether a call failed; not shown to the model")] = None
    # What the model thought.
    thinking: Annotated[str | None, about("what the model thought")] = None
    signature: Annotated[str | None, about("accepted, without effect")] = None
    # Without effect: what is computed of equal prompts is kept anyway; who made a call.
    cache_control: Annotated[msgspec.Raw, about("accepted, without effect")] = _NONE
    caller: Annotated[msgspec.Raw, about("accepted, without effect")] = _NONE
    # Taken where they ask for nothing.
    citations: Refused = _NONE
    data: Refused = _NONE
    file_id: Refused = _NONE
    toolset_name: Refused = _NONE


class Turn(_Body):
    """One message."""

    role: Annotated[str | None, about("user, assistant or system")] = None
    content: Annotated[str | list[Block] | None, about("a text, or blocks in their order")] = None


class Tool(_Body):
    """A tool that the client runs."""

    type: Annotated[str | None, about("custom", "custom")] = None
    name: Annotated[str | None, about("its name")] = None
    description: Annotated[str | None, about("what it does")] = None
    input_schema: Annotated[msgspec.Raw, about("a JSON schema of what it is called with")] = _NONE
    strict: Annotated[bool | None, about("whether the schema is kept to the letter")] = None
    # Without effect.
    cache_control: Annotated[msgspec.Raw, about("accepted, without effect")] = _NONE
    eager_input_streaming: Annotated[bool | None, about("accepted, without effect")] = None


class ToolChoice(_Body):
    """Whether tools are called."""

    type: Annotated[str | None, about("auto, any, tool or none")] = None
    name: Annotated[str | None, about("of tool: the one that has to be called")] = None
    disable_parallel_tool_use: Annotated[
        bool | None, about("true leaves all calls but the first one out", "false")
    ] = None


class Thinking(_Body):
    """Whether the model thinks before it answers."""

    type: Annotated[str | None, about("enabled, adaptive or disabled")] = None
    budget_tokens: Annotated[
        Whole | None,
        about("of enabled: at most so many tokens of thinking, then its end is forced"),
    ] = None
    display: Annotated[str | None, about("summarized or omitted")] = None


class OutputFormat(_Body):
    """The form of the answer."""

    type: Annotated[str | None, about("json_schema")] = None
    schema: Annotated[msgspec.Raw, about("the schema")] = _NONE


class OutputConfig(_Body):
    """How hard to think, and the form of the answer."""

    effort: Annotated[str | None, about("how hard to think, for the chat template")] = None
    format: Annotated[OutputFormat | None, about("the form of the answer")] = None


class Metadata(_Body):
    """About the request."""

    user_id: Annotated[str | None, about("the tenant, where no API key is checked")] = None


class ContextEdit(_Body):
    """What is left out of earlier turns."""

    type: Annotated[str | None, about("clear_thinking_20251015")] = None
    keep: Annotated[
        msgspec.Raw,
        about('"all", or {"type": "thinking_turns", "value": ...}: the last so many', "1"),
    ] = _NONE


class ContextManagement(_Body):
    """What becomes of earlier turns."""

    edits: Annotated[list[ContextEdit] | None, about("what is left out of them")] = None


class CountBody(_Body):
    """POST /v1/messages/count_tokens: the tokens of a prompt."""

    model: str | None = None
    messages: Annotated[
        list[Turn] | None,
        about(
            "turns of `user`, `assistant` and `system`; a text, or blocks: `text`, `image` (`base64`, `url`, or `file`:"
            " one that was sent to `/v1/files`), in turns of the assistant `thinking` and `tool_use`, in those of the"
            " user `document` (`text` or `content`) and `search_result`, which are shown as text, and `tool_result` (a"
            " text, or blocks of all these). Where the last turn is the assistant's, the answer goes on with it",
            example=[{"role": "user", "content": "What is there?"}],
        ),
    ] = None
    system: Annotated[str | list[Block] | None, about("a text, or blocks of text", "none")] = None
    tools: Annotated[
        list[Tool] | None,
        about(
            "`name`, `description`, `input_schema`, `strict`; tools of other types than `custom`, which Anthropic's"
            " server or models bring, are refused",
            "none",
        ),
    ] = None
    tool_choice: Annotated[
        ToolChoice | None,
        about(
            "`auto`, `any` (at least one call), `tool` with its `name`, `none`; `disable_parallel_tool_use` leaves all"
            " calls but the first one out",
            "auto",
        ),
    ] = None
    thinking: Annotated[
        Thinking | None,
        about(
            "`enabled` and `adaptive` give `enable_thinking: true` to the chat template, `disabled` false, and leaves"
            ' thoughts out of the reply, as `display: "omitted"` does. `budget_tokens` bounds thoughts, and is given to'
            " the template as `thinking_budget`",
            "the template's",
        ),
    ] = None
    output_config: Annotated[
        OutputConfig | None,
        about(
            "`effort` is given to the template as `reasoning_effort`; `format` with a `json_schema` is the form of the"
            " answer",
            "none",
        ),
    ] = None
    context_management: Annotated[
        ContextManagement | None,
        about(
            "`edits` of the type `clear_thinking_20251015` leave the thoughts of all turns out but the last ones, as"
            " `keep` says; the template may leave out more"
        ),
    ] = None
    cache_control: Annotated[msgspec.Raw, about("accepted, without effect")] = _NONE
    output_format: Annotated[
        OutputFormat | None, about("the older name of `output_config.format`")
    ] = None
    # Taken where they ask for nothing (`refused_fields.py`).
    container: Refused = _NONE
    mcp_servers: Refused = _NONE
    thread: Refused = _NONE
    compaction: Refused = _NONE
    fallbacks: Refused = _NONE
    speed: Refused = _NONE
    inference_geo: Refused = _NONE
    diagnostics: Refused = _NONE
    billing_policy: Refused = _NONE
    fallback_credit_token: Refused = _NONE


class MessagesBody(CountBody):
    """POST /v1/messages: the next turn of a conversation."""

    max_tokens: Annotated[
        Whole | None,
        about(
            "at least 1. More than the prompt leaves of the model's length means all that it leaves: clients send large"
            " numbers of their own",
            "checkpoint",
            example=50,
        ),
    ] = None
    metadata: Annotated[
        Metadata | None, about("`user_id`: the tenant where no key is checked, as `user`")
    ] = None
    service_tier: str | None = None
    stop_sequences: Annotated[
        list[str] | None, about("up to 16 texts that end the answer", "none")
    ] = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: Whole | None = None
    top_p: float | None = None


class TokenCount(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens."""

    input_tokens: Annotated[int, about("tokens of the prompt")]
