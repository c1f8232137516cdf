"""The bodies of OpenAI's and vLLM's requests and replies.

Fields of requests that are not listed are ignored: clients send many. Those of tokenizing are refused: each would
change what comes back.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from services.gateway.decoding.about import REFUSED, Refused, about
from services.gateway.decoding.decode import Whole
from services.gateway.reading.calls.tools import ToolFields
from services.gateway.reading.options import WINDOW, GenerationOptions
from services.gateway.reading.prompt_parts import MediaData

_NONE = msgspec.Raw()
_TEMPLATE_KWARGS = about("an object: variables for the chat template; up to 64 KiB", "{}")
_OPENS = about("whether the prompt ends with the begin of the assistant's turn", "true")
_SHARED_MEMORY = "a list of blocks of shared memory, as MindIE-LLM has it (--mindie-shm)"


class _Repeated(msgspec.Struct):
    """What a body may hold many of."""

    def __post_init__(self) -> None:
        """Does nothing: that Python is called at all lets other threads run while a large body is decoded."""


class MediaUrl(_Repeated):
    """Where an image or a video is."""

    url: Annotated[str | None, about("a data:, http:, https: or file: URL")] = None
    detail: Annotated[str | None, about("auto, low or high; without effect")] = None
    seconds_per_frame: Annotated[
        float | None, about("of a video that is sent as frames: from one to the next", "0.5")
    ] = None


class SentFile(_Repeated):
    """A file, which is taken where it is an image."""

    file_id: Annotated[str | None, about("one that was sent to /v1/files")] = None
    file_data: Annotated[str | None, about("a data: URL")] = None
    filename: Annotated[str | None, about("without effect")] = None


class ContentPart(_Repeated):
    """One part of a message: the field that `type` names is read, without it the one that there is."""

    type: Annotated[str | None, about("text, image_url, video_url, image, video or file")] = None
    text: Annotated[str | None, about("a text")] = None
    image_url: Annotated[str | MediaUrl | None, about("an image, by its URL")] = None
    video_url: Annotated[str | MediaUrl | None, about("a video, by its URL")] = None
    file: Annotated[SentFile | None, about("an image, as a file")] = None
    # MindIE's.
    image: Annotated[str | None, about("an image, by a URL or the path of a file")] = None
    video: Annotated[str | None, about("a video, by a URL or the path of a file")] = None
    uuid: Annotated[
        str | None,
        about(
            "of an image or a video: a name by which later requests of the tenant may refer to it, with null in the"
            " place of its URL"
        ),
    ] = None
    audio: Refused = _NONE


class CalledFunction(_Repeated):
    """What was called: a tool, with the text of a JSON object or the object itself."""

    name: Annotated[str | None, about("the tool's name")] = None
    arguments: Annotated[msgspec.Raw, about("a JSON object, or the text of one")] = _NONE


class CalledCustom(_Repeated):
    """What was called: a custom tool, with the text that it was given."""

    name: Annotated[str | None, about("the tool's name")] = None
    input: Annotated[str | None, about("its input")] = None


class ToolCall(_Repeated):
    """A call in an assistant's turn."""

    id: Annotated[str | None, about("its name, by which its result refers to it")] = None
    function: Annotated[CalledFunction | None, about("what was called")] = None
    custom: Annotated[
        CalledCustom | None, about("what was called, where that is a custom tool")
    ] = None


class ChatMessage(_Repeated):
    """One turn."""

    role: Annotated[str | None, about("system, developer, user, assistant or tool")] = None
    content: Annotated[str | list[ContentPart] | None, about("a text, or parts in their order")] = (
        None
    )
    name: Annotated[str | None, about("who speaks; up to 256 characters")] = None
    tool_calls: Annotated[list[ToolCall] | None, about("calls of an assistant's turn")] = None
    tool_call_id: Annotated[str | None, about("of a tool's turn: the call that it answers")] = None
    reasoning: Annotated[str | None, about("what the assistant thought")] = None
    reasoning_content: Annotated[
        str | None, about("the same, under another name that goes before")
    ] = None
    function_call: Refused = _NONE
    audio: Refused = _NONE


_EXAMPLE = [{"role": "user", "content": "What is there?"}]


class ChatRequest(GenerationOptions, kw_only=True):
    """POST /v1/chat/completions: an answer to a conversation."""

    messages: Annotated[
        list[ChatMessage] | None,
        about("at least one turn; up to 4096, with 8192 parts", example=_EXAMPLE),
    ] = None
    chat_template_kwargs: Annotated[msgspec.Raw, _TEMPLATE_KWARGS] = _NONE
    add_generation_prompt: Annotated[bool | None, _OPENS] = None
    logprobs: Annotated[
        bool | Whole | None, about("true: log-probabilities of the answer's tokens", "false")
    ] = None
    top_logprobs: Annotated[
        Whole | None,
        about("so many of the likeliest tokens; up to `--max-logprobs` (20)", "0", minimum=0),
    ] = None
    include_reasoning: Annotated[
        bool | None, about("false leaves reasoning out of the reply", "true")
    ] = None


class CompletionRequest(GenerationOptions, kw_only=True):
    """POST /v1/completions: what follows a text."""

    prompt: Annotated[
        str | list[str | Whole | list[Whole]] | None,
        about(
            "a text or a list of token ids, or a list of up to 128 of them (`--max-prompts`)",
            example="What is there?",
        ),
    ] = None
    multi_modal_data: Annotated[
        MediaData | None,
        about(
            '`{"image": ..., "video": ...}`, as in vLLM: one URL or a list of each, for a `prompt` that is one text. It'
            " marks their places by the model's own placeholders, in order, images first; where it has none, they stand"
            " before it",
            "none",
        ),
    ] = None
    logprobs: Annotated[
        Whole | None,
        about(
            "log-probabilities with so many of the likeliest tokens; up to `--max-logprobs` (20)",
            "none",
            minimum=0,
        ),
    ] = None
    top_logprobs: Annotated[Whole | None, REFUSED] = None
    # MindIE-LLM's: removed once the prompt that names its blocks is prepared.
    shm_name_save_path: Annotated[str | None, about(_SHARED_MEMORY)] = None


class TokenizeRequest(ToolFields, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: the tokens of `prompt`, or of `messages` with the chat template."""

    model: Annotated[str | None, about("the served name", "the only one")] = None
    prompt: Annotated[str | None, about("a text", example="What is there?")] = None
    messages: Annotated[list[ChatMessage] | None, about("a conversation")] = None
    chat_template_kwargs: Annotated[msgspec.Raw, _TEMPLATE_KWARGS] = _NONE
    add_generation_prompt: Annotated[bool | None, _OPENS] = None
    add_special_tokens: bool | None = None
    max_window_size: Annotated[Whole | None, WINDOW] = None
    return_token_strs: Annotated[
        bool | None, about("each token as the vocabulary spells it, too", "false")
    ] = None
    # MindIE-LLM's: the names of the blocks to which pictures are written are appended to it.
    shm_name_save_path: Annotated[str | None, about(_SHARED_MEMORY)] = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize: the text of `tokens`."""

    model: Annotated[str | None, about("the served name", "the only one")] = None
    tokens: Annotated[list[Whole] | None, about("token ids", example=[1, 2])] = None


class ModelCard(msgspec.Struct, kw_only=True):
    """GET /v1/models/{id}: the model that is served."""

    id: Annotated[str, about("its name")]
    object: str = "model"
    created: Annotated[int, about("when this gateway started, in seconds of Unix time")]
    owned_by: str = "tessera"
    max_model_len: Annotated[int, about("tokens of prompt and answer together at most")]
    parent: Annotated[str | None, about("the model that an adapter adapts")] = None
    adapter: Annotated[
        str | None, about("of the model: the adapter that answers where a request names the model")
    ] = None
    tasks: Annotated[
        list[str], about("what it is served for: generate, embed, classify, score")
    ] = []
    # As Anthropic's clients know a model.
    type: str = "model"
    display_name: Annotated[str, about("its name")] = ""
    created_at: Annotated[str, about("as `created`, as RFC 3339 writes it")] = ""
    parts: Annotated[
        Mapping[str, Mapping[str, Any]],
        about(
            "by prompt, encoder and decoder: whose code runs it, what is off, and the difference that was measured at"
            " start"
        ),
    ] = {}


class ModelList(msgspec.Struct, kw_only=True):
    """GET /v1/models: the one model that is served."""

    object: str = "list"
    data: list[ModelCard]
    # As Anthropic's clients know a list.
    first_id: Annotated[str, about("the first one's `id`")] = ""
    last_id: Annotated[str, about("the last one's `id`")] = ""
    has_more: Annotated[bool, about("false: there are no others")] = False


class TokenizeReply(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The tokens of a prompt."""

    count: Annotated[int, about("how many there are")]
    max_model_len: Annotated[int, about("how many the model takes")]
    tokens: Annotated[list[int], about("their ids")]
    token_strs: Annotated[
        list[str | None] | None,
        about("as the vocabulary spells them, where asked for; null for an id without a token"),
    ] = None


class DetokenizeReply(msgspec.Struct, kw_only=True):
    """The text of tokens."""

    prompt: str
