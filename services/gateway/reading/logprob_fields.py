"""Which log-probabilities a request asks for. Chat and completions ask in different ways."""

from dataclasses import dataclass

from services.gateway.decoding.bounds import whole, wrong
from services.gateway.reading.options import GenerationOptions


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Top log-probabilities to compute for each generated and each prompt token; None is none, 0
    the token's own alone. `shown` are the prompt's that the reply has.
    """

    output: int | None = None
    prompt: int | None = None
    shown: int | None = None


def chat_logprobs(wanted: bool | float | None, top: float | None, most: int) -> int | None:
    """The top ones for each token of a chat's answer. Raises InvalidRequest naming the field."""
    if not isinstance(wanted, bool | None):
        raise wrong(
            "logprobs",
            "must be true or false in a chat, not a number: give the number of likeliest tokens as top_logprobs",
            "INVALID_TYPE",
        )
    count = whole("top_logprobs", top, 0, most) or 0
    if count and not wanted:
        raise wrong("top_logprobs", "needs logprobs to be true")
    return count if wanted else None


def completion_logprobs(top: float | None, of_chat: float | None, most: int) -> int | None:
    """The top ones for each token of a completion; `of_chat` is chat's field. Raises InvalidRequest
    naming the field.
    """
    if of_chat:
        raise wrong("top_logprobs", "is for chat: leave it out, and give their number as logprobs")
    return whole("logprobs", top, 0, most)


def read_logprobs(options: GenerationOptions, output: int | None, most: int) -> Logprobs:
    """Adds the prompt's to those of the output. Raises InvalidRequest naming the field.

    A completion that repeats its prompt (`echo`) has the prompt's as well.
    """
    shown = whole("prompt_logprobs", options.prompt_logprobs, 0, most)
    echoed = output if options.echo else None
    prompt = max((k for k in (shown, echoed) if k is not None), default=None)
    return Logprobs(output, prompt, shown)
