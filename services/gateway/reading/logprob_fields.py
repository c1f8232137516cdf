"""Which log-probabilities a request asks for: the two doors ask in different ways."""

from dataclasses import dataclass

from services.gateway.reading.fields import Fields
from tessera.scheduler.v1.queue_pb2 import ReplyFormat, ReplyKind


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Top log-probabilities to compute for each generated and each prompt token; None is none, 0
    the token's own alone.
    """

    output: int | None = None
    prompt: int | None = None


def read_logprobs(fields: Fields, reply: ReplyFormat, most: int) -> Logprobs:
    """Reads them, with what is to be shown in `reply`. Raises InvalidRequest naming the field.

    A completion that repeats its prompt (`echo`) tells the prompt's as well.
    """
    is_chat = reply.kind == ReplyKind.REPLY_KIND_CHAT
    output = _chat(fields, most) if is_chat else _completion(fields, most)
    shown = fields.integer("prompt_logprobs", 0, most)
    if shown is not None:
        reply.prompt_logprobs = shown
    echoed = output if reply.echo else None
    prompt = max((k for k in (shown, echoed) if k is not None), default=None)
    return Logprobs(output, prompt)


def _chat(fields: Fields, most: int) -> int | None:
    wanted = fields.boolean("logprobs", False)
    top = fields.integer("top_logprobs", 0, most) or 0
    if top and not wanted:
        raise fields.wrong("top_logprobs", "needs logprobs to be true")
    return top if wanted else None


def _completion(fields: Fields, most: int) -> int | None:
    if fields.raw("top_logprobs"):
        raise fields.wrong("top_logprobs", "is for chat; give their number as logprobs")
    return fields.integer("logprobs", 0, most)
