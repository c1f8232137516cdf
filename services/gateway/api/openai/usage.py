"""`usage` and `stop_reason` as OpenAI and vLLM have them."""

from collections.abc import Collection
from typing import Any

from tessera.common.v1.ending_pb2 import Ending


def usage_object(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    """OpenAI's `usage`; `completion` counts the tokens of all choices, `cached` once it is known."""
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return usage


def stop_reason(ending: Ending, silent_ends: Collection[int]) -> str | int | None:
    """vLLM's `stop_reason`: the stop string or end id that was found; null at the limit or the
    tokenizer's own end. The other end ids of a model (`<|eom_id|>`, say) are told.
    """
    if ending.stop:
        return ending.stop
    if ending.HasField("stop_token_id") and ending.stop_token_id not in silent_ends:
        return ending.stop_token_id
    return None
