"""The bodies of vLLM's POST /generate. Fields that are not listed are ignored."""

import msgspec

from services.gateway.reading.options import GenerationOptions
from services.gateway.reading.prompt_parts import PromptText


class GenerateRequest(GenerationOptions, kw_only=True):
    """POST /generate: vLLM's sampling parameters beside `prompt`, which is a text or a list of parts."""

    prompt: PromptText | None = None


class GenerateReply(msgspec.Struct, kw_only=True):
    """The prompt with each answer behind it."""

    text: list[str]
