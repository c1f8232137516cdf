"""Offline use, `from tessera import LLM, SamplingParams`, beside the generated messages of the services.

Importing this imports nothing else: the services, which need the messages alone, do it as well.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from services.launcher.offline import (
        LLM,
        AsyncEngine,
        AsyncEngineArgs,
        AsyncLLMEngine,
        ClassificationOutput,
        CompletionOutput,
        EmbeddingOutput,
        EngineFailed,
        Logprob,
        LoRARequest,
        PooledOutput,
        RequestMetrics,
        RequestOutput,
        RequestRefused,
        SamplingParams,
        ScoringOutput,
    )

__all__ = [
    "LLM",
    "AsyncEngine",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "ClassificationOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EngineFailed",
    "LoRARequest",
    "Logprob",
    "PooledOutput",
    "RequestMetrics",
    "RequestOutput",
    "RequestRefused",
    "SamplingParams",
    "ScoringOutput",
]


def __getattr__(name: str) -> Any:
    """A name of offline use, imported when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("services.launcher.offline"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
