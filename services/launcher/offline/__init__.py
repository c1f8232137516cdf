"""Offline use: `from tessera import LLM, SamplingParams` runs a whole system as child processes of a Python program."""

from services.launcher.offline.async_engine import AsyncEngine, AsyncEngineArgs, AsyncLLMEngine
from services.launcher.offline.errors import EngineFailed, RequestRefused
from services.launcher.offline.llm import LLM
from services.launcher.offline.lora_request import LoRARequest
from services.launcher.offline.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from services.launcher.offline.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "AsyncEngine",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "CompletionOutput",
    "EngineFailed",
    "LoRARequest",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "RequestRefused",
    "SamplingParams",
]
