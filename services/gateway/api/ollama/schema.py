"""The bodies of Ollama's requests. What is not listed is refused by its name."""

import msgspec

from services.gateway.decoding.decode import Whole

_NONE = msgspec.Raw()


class Options(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`options`: how to generate."""

    num_predict: Whole | None = None
    num_ctx: Whole | None = None
    seed: Whole | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_k: Whole | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # Taken with the value that means "off" alone.
    repeat_last_n: msgspec.Raw = _NONE
    mirostat: msgspec.Raw = _NONE
    tfs_z: msgspec.Raw = _NONE
    typical_p: msgspec.Raw = _NONE
    # How Ollama's own engine computes an answer, which changes none here.
    low_vram: msgspec.Raw = _NONE
    main_gpu: msgspec.Raw = _NONE
    num_batch: msgspec.Raw = _NONE
    num_gpu: msgspec.Raw = _NONE
    num_keep: msgspec.Raw = _NONE
    num_thread: msgspec.Raw = _NONE
    numa: msgspec.Raw = _NONE
    use_mlock: msgspec.Raw = _NONE
    use_mmap: msgspec.Raw = _NONE


class GeneratingBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What chat and generate have in common."""

    model: str | None = None
    stream: bool | None = None
    options: Options | None = None
    keep_alive: str | float | None = None
    think: bool | str | None = None
    # Taken with the value that means "off" alone.
    format: msgspec.Raw = _NONE
    logprobs: msgspec.Raw = _NONE
    top_logprobs: msgspec.Raw = _NONE
    truncate: msgspec.Raw = _NONE
    shift: msgspec.Raw = _NONE


class Turn(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One message."""

    role: str | None = None
    content: str | None = None
    images: list[str] | None = None  # files in base64
    # Not taken.
    thinking: msgspec.Raw = _NONE
    tool_calls: msgspec.Raw = _NONE
    tool_name: msgspec.Raw = _NONE
    tool_call_id: msgspec.Raw = _NONE

    def __post_init__(self) -> None:
        """Does nothing: that Python is called at all lets other threads run while a large body is decoded."""


class ChatBody(GeneratingBody, kw_only=True):
    """POST /api/chat."""

    messages: list[Turn] | None = None
    tools: msgspec.Raw = _NONE


class GenerateBody(GeneratingBody, kw_only=True):
    """POST /api/generate."""

    prompt: str | None = None
    images: list[str] | None = None  # files in base64
    system: str | None = None
    raw: bool | None = None
    # Taken with the value that means "off" alone.
    suffix: msgspec.Raw = _NONE
    template: msgspec.Raw = _NONE
    context: msgspec.Raw = _NONE


class EmbedBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /api/embed."""

    model: str | None = None
    input: str | list[str] | None = None
    truncate: bool | None = None
    dimensions: Whole | None = None
    options: Options | None = None
    keep_alive: str | float | None = None


class EmbeddingsBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /api/embeddings, which is the older one."""

    model: str | None = None
    prompt: str | None = None
    options: Options | None = None
    keep_alive: str | float | None = None


class ShowBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /api/show."""

    model: str | None = None
    name: str | None = None  # the older name of `model`
    verbose: bool | None = None


class Details(msgspec.Struct, kw_only=True):
    """What a model is."""

    format: str = "safetensors"
    family: str
    families: list[str]


class ModelEntry(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A model in the lists of GET /api/tags and GET /api/ps."""

    name: str
    model: str
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
