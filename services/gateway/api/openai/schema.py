"""The bodies of OpenAI's and vLLM's requests and replies.

Fields of requests that are not listed are ignored: clients send many. Those of tokenizing are refused: each would
change what comes back.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from services.gateway.decoding.decode import Whole
from services.gateway.reading.calls.tools import ToolFields
from services.gateway.reading.options import GenerationOptions
from services.gateway.reading.prompt_parts import MediaData

_NONE = msgspec.Raw()


class _Repeated(msgspec.Struct):
    """What a body may hold many of."""

    def __post_init__(self) -> None:
        """Does nothing: that Python is called at all lets other threads run while a large body is decoded."""


class MediaUrl(_Repeated):
    """Where an image or a video is."""

    url: str | None = None
    detail: str | None = None
    seconds_per_frame: float | None = None


class ContentPart(_Repeated):
    """One part of a message: the field that `type` names is read, without it the one that there is."""

    type: str | None = None
    text: str | None = None
    image_url: str | MediaUrl | None = None
    video_url: str | MediaUrl | None = None
    # MindIE's: a URL, or the path of a file.
    image: str | None = None
    video: str | None = None
    # Not taken.
    audio: msgspec.Raw = _NONE


class CalledFunction(_Repeated):
    """What was called: a tool, with the text of a JSON object or the object itself."""

    name: str | None = None
    arguments: msgspec.Raw = _NONE


class ToolCall(_Repeated):
    """A call in an assistant's turn."""

    id: str | None = None
    function: CalledFunction | None = None


class ChatMessage(_Repeated):
    """One turn."""

    role: str | None = None
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # What the assistant thought, under two names.
    reasoning: str | None = None
    reasoning_content: str | None = None
    # Not taken.
    function_call: msgspec.Raw = _NONE
    audio: msgspec.Raw = _NONE


class ChatRequest(GenerationOptions, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] | None = None
    chat_template_kwargs: msgspec.Raw = _NONE
    add_generation_prompt: bool | None = None
    logprobs: bool | Whole | None = None
    top_logprobs: Whole | None = None
    include_reasoning: bool | None = None


class CompletionRequest(GenerationOptions, kw_only=True):
    """POST /v1/completions."""

    # A text, token ids, several texts, or several lists of ids.
    prompt: str | list[str | Whole | list[Whole]] | None = None
    # vLLM's, of offline use: the images and videos of one prompt that is a text.
    multi_modal_data: MediaData | None = None
    logprobs: Whole | None = None
    top_logprobs: Whole | None = None
    # MindIE-LLM's: a list of blocks of shared memory, removed once the prompt that names them is prepared.
    shm_name_save_path: str | None = None


class TokenizeRequest(ToolFields, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: `prompt`, or `messages` with the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    chat_template_kwargs: msgspec.Raw = _NONE
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    max_window_size: Whole | None = None
    return_token_strs: bool | None = None
    # MindIE-LLM's: pictures are written to shared memory, and the names of their blocks appended to this list.
    shm_name_save_path: str | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[Whole] | None = None


class ModelCard(msgspec.Struct, kw_only=True):
    """GET /v1/models/{id}."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "tessera"
    max_model_len: int
    # What it is served for: generate, embed, classify, score.
    tasks: list[str] = []
    # By prompt, encoder and decoder: whose code runs it, what is off, and the difference that was measured at start.
    parts: Mapping[str, Mapping[str, Any]] = {}


class ModelList(msgspec.Struct, kw_only=True):
    """GET /v1/models."""

    object: str = "list"
    data: list[ModelCard]


class TokenizeReply(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The tokens of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    # As the vocabulary spells them, where they were asked for; None for an id without a token.
    token_strs: list[str | None] | None = None


class DetokenizeReply(msgspec.Struct, kw_only=True):
    """The text of tokens."""

    prompt: str
