"""`usage` as OpenAI has it."""

from typing import Any

from services.gateway.following.answer import Answer


def usage_object(
    prompt: int, completion: int, cached: int | None = None, reasoning: int | None = None
) -> dict[str, Any]:
    """OpenAI's `usage`; `completion` counts the tokens of all choices, `reasoning` those of them in which the model
    thought, where it does, `cached` once it is known.
    """
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    if reasoning is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return usage


class Total:
    """What `usage` adds up: the answers of one reply and the tokens of each one's choices. The writers share it and it
    does not refer to them: nothing of a reply that has ended waits for the garbage collector.
    """

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.counts: list[list[int]] = []

    def spent(self) -> tuple[int, int]:
        """Tokens of the prompts and of the choices."""
        prompts = sum(answer.prompt_tokens for answer in self.answers)
        return prompts, sum(map(sum, self.counts))

    def reasoning(self) -> int | None:
        """Of the choices' tokens those in which the model thought; None where that is not known."""
        if not any(answer.head.reply.message.reasoning for answer in self.answers):
            return None
        return sum(answer.reasoning_tokens for answer in self.answers)

    def cached(self) -> int:
        """Tokens of the prompts that were found in a cache."""
        return sum(answer.cached_tokens for answer in self.answers)
