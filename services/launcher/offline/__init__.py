"""Offline use: `from tessera import LLM, SamplingParams` runs a whole system as child processes of a Python program."""

from services.launcher.offline.async_engine import AsyncEngine, AsyncEngineArgs, AsyncLLMEngine
from services.launcher.offline.errors import EngineFailed, RequestRefused
from services.launcher.offline.llm import LLM
from services.launcher.offline.lora_request import LoRARequest
from services.launcher.offline.outputs import (
    ClassificationOutput,
    CompletionOutput,
    EmbeddingOutput,
    Logprob,
    PooledOutput,
    RequestMetrics,
    RequestOutput,
    ScoringOutput,
)
from services.launcher.offline.sampling_params import SamplingParams

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
