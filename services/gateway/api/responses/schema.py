"""The bodies of requests for responses. What is not listed is refused by its name."""

from typing import Annotated

import msgspec

from services.gateway.decoding.about import Refused, about
from services.gateway.decoding.decode import Whole

_NONE = msgspec.Raw()


class _Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A part of a body."""

    def __post_init__(self) -> None:
        """Does nothing: that Python is called at all lets other threads run while a large body is decoded."""


class ContentPart(_Body):
    """One part of what an item says; `type` says which fields are read."""

    type: Annotated[
        str | None,
        about(
            "input_text, input_image, input_file, output_text or refusal; in reasoning summary_text or reasoning_text"
        ),
    ] = None
    text: Annotated[str | None, about("a text")] = None
    refusal: Annotated[str | None, about("what the assistant refused")] = None
    image_url: Annotated[str | None, about("a data:, http:, https: or file: URL")] = None
    detail: Annotated[str | None, about("auto, low or high; without effect")] = None
    # Of what a response said; without effect.
    annotations: Annotated[msgspec.Raw, about("of what a response said; without effect")] = _NONE
    logprobs: Annotated[msgspec.Raw, about("of what a response said; without effect")] = _NONE
    # Of input_file, and of input_image the first one.
    file_id: Annotated[str | None, about("an image that was sent to /v1/files")] = None
    file_data: Annotated[str | None, about("an image as a data: URL")] = None
    file_url: Annotated[str | None, about("an image's data:, http:, https: or file: URL")] = None
    filename: Annotated[str | None, about("of a file; without effect")] = None


class Item(_Body):
    """One item; `type` says which fields are read, and without it the item is a message."""

    type: Annotated[
        str | None,
        about(
            "message, function_call, function_call_output, custom_tool_call, custom_tool_call_output, reasoning,"
            " compaction or item_reference",
            "message",
        ),
    ] = None
    # Of a message, and of reasoning.
    role: Annotated[str | None, about("user, assistant, system or developer")] = None
    content: Annotated[str | list[ContentPart] | None, about("a text, or parts in their order")] = (
        None
    )
    # Of a call, and of what it gave.
    call_id: Annotated[str | None, about("the name of a call")] = None
    name: Annotated[str | None, about("the tool that was called")] = None
    arguments: Annotated[str | None, about("the text of a JSON object")] = None
    input: Annotated[str | None, about("of custom_tool_call: what the tool was given")] = None
    output: Annotated[str | list[ContentPart] | None, about("what a call gave")] = None
    # Names that a response gave; without effect.
    id: Annotated[
        str | None,
        about("the name that a response gave it; of item_reference the item that is meant"),
    ] = None
    status: Annotated[str | None, about("without effect")] = None
    phase: Annotated[str | None, about("without effect")] = None
    # Of reasoning: read where there is no content.
    summary: Annotated[
        list[ContentPart] | None, about("of reasoning: read where there is no content")
    ] = None
    encrypted_content: Annotated[
        str | None,
        about("of compaction: the summary, as it was given; of reasoning without effect"),
    ] = None


class Reasoning(_Body):
    """How hard to think."""

    effort: Annotated[
        str | None,
        about("none, minimal, low, medium, high or xhigh, for the chat template", "the template's"),
    ] = None
    summary: Annotated[
        str | None, about("auto, concise or detailed: thoughts are given whole as the summary")
    ] = None


class TextFormat(_Body):
    """The form of the answer."""

    type: Annotated[str | None, about("text, json_object or json_schema", "text")] = None
    name: Annotated[str | None, about("a name, which is repeated")] = None
    description: Annotated[str | None, about("repeated")] = None
    schema: Annotated[msgspec.Raw, about("of json_schema: the schema")] = _NONE
    strict: Annotated[
        bool | None,
        about("false leaves objects open, and leaves aside what cannot be held to", "true"),
    ] = None


class TextConfig(_Body):
    """The form of the answer, and how long it is to be."""

    format: Annotated[TextFormat | None, about("the form of the answer", "text")] = None
    verbosity: Annotated[str | None, about("low, medium or high, for the chat template")] = None


class StreamOptions(_Body):
    """What events have beside what they say; without effect: ours have nothing else."""

    include_obfuscation: Annotated[
        bool | None, about("without effect: events have nothing else")
    ] = None


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
    """POST /v1/responses: the next response of a conversation."""

    model: str | None = None
    input: Annotated[
        str | list[Item] | None,
        about(
            "a text, or items: messages (`role` user, assistant, system or developer; a text, or parts `input_text`,"
            " `input_image` with an `image_url` or `file_id`, `input_file` of an image with `file_id`, `file_data` or"
            " `file_url`, `output_text`, `refusal`), `function_call`, `function_call_output` (a text or such parts),"
            " `custom_tool_call`, `custom_tool_call_output` likewise, `reasoning`, `compaction` ([more](#compaction)),"
            " `item_reference` to an item of a kept response",
            example="What is there?",
        ),
    ] = None
    instructions: Annotated[
        str | None, about("the system message, of this response alone", "none")
    ] = None
    previous_response_id: Annotated[
        str | None,
        about(
            "a kept response: its input, its output and what came before them stand before `input`",
            "none",
        ),
    ] = None
    store: Annotated[bool | None, about("whether the response is kept", "true")] = None
    background: Annotated[
        bool | None,
        about(
            "true: the reply comes at once (`queued`), the answer is made whoever listens", "false"
        ),
    ] = None
    metadata: Annotated[
        dict[str, str] | None,
        about(
            "up to 16 texts of up to 512 characters under names of up to 64; repeated in the response",
            "`{}`",
        ),
    ] = None
    include: Annotated[
        list[str] | None,
        about(
            "`message.output_text.logprobs`: log-probabilities of the tokens of texts; others that OpenAI has are"
            " accepted, without effect"
        ),
    ] = None
    stream: bool | None = None
    stream_options: Annotated[StreamOptions | None, about("accepted, without effect")] = None
    # What the model may do, and how it answers.
    tools: Annotated[
        msgspec.Raw,
        about(
            "functions (`name`, `description`, `parameters`, `strict`), and `custom` ones (`name`, `description`,"
            " `format`). Tools that OpenAI would run are repeated in the response, and the model is not told of them",
            "none",
        ),
    ] = _NONE
    tool_choice: Annotated[
        msgspec.Raw,
        about(
            '"auto", "none", "required", `{"type": "function", "name": ...}`, likewise of a custom one, `{"type":'
            ' "allowed_tools", "mode", "tools"}`: the model is told of these alone',
            '"auto"',
        ),
    ] = _NONE
    parallel_tool_calls: Annotated[
        bool | None, about("false leaves all calls but the first one out", "true")
    ] = None
    reasoning: Annotated[
        Reasoning | None,
        about(
            "`effort` as `reasoning_effort` of chats; with `summary` (`auto`, `concise`, `detailed`) thoughts are given"
            " whole as the summary"
        ),
    ] = None
    text: Annotated[
        TextConfig | None,
        about(
            "`format` (`text`, `json_object`, `json_schema`) is the form of the answer; `verbosity` is given to the"
            " chat template under this name",
            "text",
        ),
    ] = None
    truncation: Annotated[
        str | None,
        about(
            '"auto": of a conversation that exceeds the model\'s length the oldest turns are left out, but the system'
            ' message; "disabled": a 400',
            '"disabled"',
        ),
    ] = None
    # Which tokens, and how many.
    max_output_tokens: Annotated[
        Whole | None,
        about("1 to the model's length; with the prompt not above it", "checkpoint", example=50),
    ] = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[
        Whole | None,
        about(
            "so many of the likeliest tokens beside each of a text; up to `--max-logprobs` (20)",
            "0",
        ),
    ] = None
    # Who asks, and with what urgency.
    user: str | None = None
    service_tier: str | None = None
    # Repeated, without effect: tools of the server's own, who asks, where to find what was computed.
    max_tool_calls: Annotated[Whole | None, about("repeated, without effect")] = None
    client_metadata: Annotated[
        dict[str, str] | None,
        about("accepted, without effect: what coding agents say of themselves"),
    ] = None
    safety_identifier: Annotated[str | None, about("repeated, without effect")] = None
    prompt_cache_key: Annotated[str | None, about("repeated, without effect")] = None
    prompt_cache_retention: Annotated[str | None, about("repeated, without effect")] = None
    # As in chats; OpenAI has none of them.
    top_k: Whole | None = None
    min_p: float | None = None
    seed: Whole | None = None
    stop: str | list[str] | None = None
    thinking_token_budget: Whole | None = None
    mm_processor_kwargs: msgspec.Raw = _NONE
    media_io_kwargs: msgspec.Raw = _NONE
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    priority: Whole | None = None
    timeout: float | None = None
    cache_salt: str | None = None
    # Without effect, as what goes before them; and those that are taken where they ask for nothing.
    prompt_cache_options: Annotated[msgspec.Raw, about("accepted, without effect")] = _NONE
    conversation: Refused = _NONE
    prompt: Refused = _NONE
    context_management: Refused = _NONE
    moderation: Refused = _NONE


class CompactBody(_Body):
    """POST /v1/responses/compact."""

    model: str | None = None
    input: Annotated[
        str | list[Item] | None,
        about("the conversation, as in a response", example="What is there?"),
    ] = None
    instructions: Annotated[
        str | None, about("the system message that the conversation had", "none")
    ] = None
    previous_response_id: Annotated[
        str | None,
        about("a kept response: the conversation until then stands before `input`", "none"),
    ] = None
    max_output_tokens: Annotated[
        Whole | None,
        about(
            "tokens of the summary at most; what the prompt leaves of the model's length, where that is less",
            "2048, or a quarter of the model's length",
        ),
    ] = None
    user: str | None = None
    service_tier: str | None = None
    prompt_cache_key: Annotated[str | None, about("accepted, without effect")] = None
    prompt_cache_retention: Annotated[str | None, about("accepted, without effect")] = None
    prompt_cache_options: Annotated[msgspec.Raw, about("accepted, without effect")] = _NONE
    # As in chats; OpenAI has none of them.
    priority: Whole | None = None
    timeout: float | None = None
    cache_salt: str | None = None


class InputTokens(msgspec.Struct, kw_only=True):
    """POST /v1/responses/input_tokens."""

    object: str = "response.input_tokens"
    input_tokens: Annotated[int, about("tokens of the prompt that the body would make")]
