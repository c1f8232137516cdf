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


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """POST /v1/load_lora_adapter: which adapter is loaded from where."""

    lora_name: Annotated[str | None, about("the name by which requests pick it", example="sql")] = (
        None
    )
    lora_path: Annotated[
        str | None,
        about("its folder, below that of --allowed-adapter-dir", example="/adapters/sql"),
    ] = None
    load_inplace: Annotated[
        bool | None, about("it takes the name of an adapter that has it", "false")
    ] = None


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    """POST /v1/unload_lora_adapter: which adapter is served no longer."""

    lora_name: Annotated[str | None, about("its name", example="sql")] = None
