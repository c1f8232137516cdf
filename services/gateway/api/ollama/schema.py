"""The bodies of Ollama's requests. What is not listed is refused by its name."""

from typing import Annotated

import msgspec

from services.gateway.decoding.about import Refused, about
from services.gateway.decoding.decode import Whole

_NONE = msgspec.Raw()


class Options(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`options`: how to generate."""

    num_predict: Annotated[
        Whole | None,
        about(
            "as `max_tokens`; -1 and -2, and more than the prompt leaves of the model's length, mean all that it"
            " leaves",
            "checkpoint",
        ),
    ] = None
    num_ctx: Annotated[
        Whole | None,
        about("at least 1; all of the model's length is used whatever it says, and no more"),
    ] = None
    seed: Whole | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_k: Whole | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: Annotated[
        float | None, about("above 0, to 100; prompt and answer", "checkpoint")
    ] = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_last_n: Annotated[
        Whole | None,
        about(
            "0 is no penalty; other values than -1 only where there is none: penalties count all of prompt and answer",
            "-1",
        ),
    ] = None
    # Taken with the value that means "off" alone.
    penalize_newline: Refused = _NONE
    mirostat: Refused = _NONE
    tfs_z: Refused = _NONE
    typical_p: Refused = _NONE
    # How Ollama's own engine computes an answer, which changes none here, and what tunes mirostat, which is off.
    embedding_only: Annotated[msgspec.Raw, about("accepted, without effect")] = _NONE
    f16_kv: Annotated[msgspec.Raw, about("accepted, without effect")] = _NONE
    logits_all: Annotated[msgspec.Raw, about("accepted, without effect")] = _NONE
    low_vram: Annotated[msgspec.Raw, about("accepted, without effect")] = _NONE
    mirostat_eta: Annotated[msgspec.Raw, about("accepted, without effect")] = _NONE
    mirostat_tau: Annotated[msgspec.Raw, about("accepted, without effect")] = _NONE
    main_gpu: Annotated[msgspec.Raw, about("accepted, without effect")] = _NONE
    num_batch: Annotated[msgspec.Raw, about("accepted, without effect")] = _NONE
    num_gpu: Annotated[msgspec.Raw, about("accepted, without effect")] = _NONE
    num_keep: Annotated[msgspec.Raw, about("accepted, without effect")] = _NONE
    num_thread: Annotated[msgspec.Raw, about("accepted, without effect")] = _NONE
    numa: Annotated[msgspec.Raw, about("accepted, without effect")] = _NONE
    use_mlock: Annotated[msgspec.Raw, about("accepted, without effect")] = _NONE
    use_mmap: Annotated[msgspec.Raw, about("accepted, without effect")] = _NONE
    vocab_only: Annotated[msgspec.Raw, about("accepted, without effect")] = _NONE


class GeneratingBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What chat and generate have in common."""

    model: Annotated[str | None, about("the served name, also with `:latest`", "the only one")] = (
        None
    )
    stream: Annotated[bool | None, about("false: one reply instead of lines", "true")] = None
    options: Annotated[Options | None, about("how to generate")] = None
    keep_alive: Annotated[
        str | float | None,
        about("a duration or a number of seconds; without effect: the model is always loaded"),
    ] = None
    think: Annotated[
        bool | str | None,
        about(
            "whether the model thinks before it answers, and low, medium, high or max for how hard: `enable_thinking`"
            " and `reasoning_effort` of the chat template; false leaves thoughts out of the reply",
            "the template's",
        ),
    ] = None
    logprobs: Annotated[
        bool | None, about("true: log-probabilities of the answer's tokens", "false")
    ] = None
    top_logprobs: Annotated[
        Whole | None,
        about("so many of the likeliest tokens beside each; up to `--max-logprobs` (20)", "0"),
    ] = None
    format: Annotated[
        msgspec.Raw,
        about(
            '`"json"` for any JSON object, or a JSON schema: the form of the answer; for `"json"`, ask for JSON in the'
            " prompt too",
            "none",
        ),
    ] = _NONE
    truncate: Annotated[
        bool | None,
        about(
            "true: of a conversation that exceeds the model's length the oldest turns are left out, but the system"
            " message",
            "false: an error",
        ),
    ] = None
    # Taken with the value that means "off" alone.
    shift: Refused = _NONE


class CalledFunction(msgspec.Struct, kw_only=True):
    """What was called."""

    name: Annotated[str | None, about("the tool's name")] = None
    arguments: Annotated[msgspec.Raw, about("a JSON object")] = _NONE


class ToolCall(msgspec.Struct, kw_only=True):
    """A call in an assistant's turn."""

    id: Annotated[str | None, about("its name, by which its result may refer to it")] = None
    function: Annotated[CalledFunction | None, about("what was called")] = None

    def __post_init__(self) -> None:
        """Does nothing: that Python is called at all lets other threads run while a large body is decoded."""


class Turn(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One message."""

    role: Annotated[str | None, about("system, user, assistant or tool")] = None
    content: Annotated[str | None, about("a text")] = None
    images: Annotated[list[str] | None, about("files in base64, which stand before the text")] = (
        None
    )
    thinking: Annotated[
        str | None, about("of an assistant's turn: what it thought, for templates that show it")
    ] = None
    tool_calls: Annotated[list[ToolCall] | None, about("calls of an assistant's turn")] = None
    tool_name: Annotated[str | None, about("of a tool's turn: which tool gave the result")] = None
    tool_call_id: Annotated[
        str | None,
        about(
            "of a tool's turn: the call that it answers; unless given, the first one of this tool without a result"
        ),
    ] = None

    def __post_init__(self) -> None:
        """Does nothing: that Python is called at all lets other threads run while a large body is decoded."""


class ChatBody(GeneratingBody, kw_only=True):
    """POST /api/chat."""

    messages: Annotated[
        list[Turn] | None,
        about("turns in their order", example=[{"role": "user", "content": "What is there?"}]),
    ] = None
    tools: Annotated[
        msgspec.Raw,
        about(
            'tools that the model sees and may call: a list of {"type": "function", "function": {"name", "description",'
            ' "parameters"}}',
            "none",
        ),
    ] = _NONE


class GenerateBody(GeneratingBody, kw_only=True):
    """POST /api/generate."""

    prompt: Annotated[str | None, about("a text", example="What is there?")] = None
    images: Annotated[list[str] | None, about("files in base64, which stand before the text")] = (
        None
    )
    system: Annotated[str | None, about("the system message", "none")] = None
    raw: Annotated[
        bool | None, about("true: the prompt as it is, without the chat template", "false")
    ] = None
    # Taken with the value that means "off" alone.
    suffix: Refused = _NONE
    template: Refused = _NONE
    context: Refused = _NONE


class EmbedBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /api/embed: vectors of texts."""

    model: Annotated[str | None, about("the served name")] = None
    input: Annotated[
        str | list[str] | None, about("a text, token ids, or up to 2048 of either")
    ] = None
    truncate: Annotated[
        bool | None, about("whether what exceeds the length is left out at a text's end")
    ] = None
    dimensions: Annotated[
        Whole | None, about("keeps so many numbers, where the model is made for it")
    ] = None
    options: Annotated[
        Options | None, about("`num_ctx`; others are of generated tokens, and change no vector")
    ] = None
    keep_alive: Annotated[
        str | float | None,
        about("a duration or seconds, without effect: the model is always loaded"),
    ] = None


class EmbeddingsBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /api/embeddings: the vector of one text, as it used to be asked for."""

    model: Annotated[str | None, about("the served name")] = None
    prompt: Annotated[str | None, about("a text")] = None
    options: Annotated[
        Options | None, about("`num_ctx`; others are of generated tokens, and change no vector")
    ] = None
    keep_alive: Annotated[
        str | float | None,
        about("a duration or seconds, without effect: the model is always loaded"),
    ] = None


class ShowBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /api/show."""

    model: str | None = None
    name: Annotated[str | None, about("the older name of `model`")] = None
    verbose: Annotated[bool | None, about("without effect")] = None
    # Taken with the value that means "off" alone: Ollama's own programs send them all.
    system: Refused = _NONE
    template: Refused = _NONE
    options: Refused = _NONE


class Details(msgspec.Struct, kw_only=True):
    """What a model is."""

    format: str = "safetensors"
    family: str
    families: list[str]


class ModelEntry(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A model in the lists of GET /api/tags and GET /api/ps."""

    name: str
    model: str
    digest: str  # of what this gateway knows of it: name, files, sizes, adapter
    size: int  # bytes of the weights' files
    modified_at: str | None = None
    details: Details
    expires_at: str | None = None
    context_length: int | None = None


class ModelEntries(msgspec.Struct, kw_only=True):
    """GET /api/tags, GET /api/ps."""

    models: list[ModelEntry]


class ModelDescription(msgspec.Struct, kw_only=True):
    """POST /api/show."""

    modified_at: str
    details: Details
    model_info: dict[str, str | int]
    capabilities: list[str]
    parameters: str  # the defaults of `options`, a line each
    template: str


class Version(msgspec.Struct, kw_only=True):
    """GET /api/version."""

    version: str
