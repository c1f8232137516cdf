"""Whether a prompt and its answer fit into a model's length: the one check of gateway and preprocess."""

from shared.errors import InvalidRequest
from shared.prompts.length_text import LENGTH_EXCEEDED, length_text


def require_prompt_fits(
    tokens: int, longest: int, field: str, most: int = 0, at_least: bool = False
) -> None:
    """Raises InvalidRequest naming `field` for a prompt of more tokens than `most`, or than `longest`, the model's
    length, where that is less or `most` is 0. `at_least`: `tokens` is a lower bound.
    """
    most = min(most or longest, longest)
    if tokens <= most:
        return
    more = "at least " if at_least else ""
    found = f"{field} resulted in {more}{tokens} tokens, and a prompt may have {most}"
    raise InvalidRequest(
        LENGTH_EXCEEDED,
        length_text(longest, found, "shorten it"),
        field=field,
        tokens=str(tokens),
        limit=str(most),
    )


def require_answer_fits(prompt_tokens: int, answer_tokens: int, longest: int) -> None:
    """Raises InvalidRequest where a prompt leaves less than `answer_tokens` of the model's length."""
    together = prompt_tokens + answer_tokens
    if together <= longest:
        return
    found = (
        f"you requested {together} tokens ({prompt_tokens} in the prompt, {answer_tokens} in the"
        " completion)"
    )
    raise InvalidRequest(
        LENGTH_EXCEEDED,
        length_text(longest, found, "shorten the prompt, or lower max_tokens"),
        field="max_tokens",
    )
