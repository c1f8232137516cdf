"""The bodies of vLLM's POST /generate. Fields that are not listed are ignored."""

from typing import Annotated

import msgspec

from services.gateway.decoding.about import about
from services.gateway.reading.options import GenerationOptions
from services.gateway.reading.prompt_parts import PromptText


class GenerateRequest(GenerationOptions, kw_only=True):
    """POST /generate: what follows a prompt. vLLM's sampling parameters stand beside it."""

    prompt: Annotated[PromptText | None, about("a text, or parts", example="What is there?")] = None


class GenerateReply(msgspec.Struct, kw_only=True):
    """The prompt with each answer behind it."""

    text: list[str]
