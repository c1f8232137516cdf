"""`usage` as OpenAI has it."""

from typing import Any


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
