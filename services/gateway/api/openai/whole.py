"""OpenAI's replies that are not streamed: one JSON body for the answers to one prompt or several, made in pieces."""

from collections.abc import Iterator, Sequence
from itertools import chain
from json.encoder import encode_basestring

from services.gateway.api.compact_json import compact
from services.gateway.api.openai.logprobs import LogprobsWriter
from services.gateway.api.openai.message_replies import CALLS_TOOLS, call_object
from services.gateway.api.openai.replies import (
    echoed,
    envelope,
    id_list,
    logprobs_writer,
    scores_of_prompt,
)
from services.gateway.api.openai.usage import usage_object
from services.gateway.endings import FINISH_NAMES, stop_reason
from services.gateway.following.answer import Answer, Outcome
from services.gateway.following.message import call_id
from services.gateway.release import release
from services.gateway.reply_kinds import CHATS

# Hugging Face's client for TGI reads no chat without it. In streams nobody does, and there each token would carry it.
_FINGERPRINT = f'"system_fingerprint":"tessera-{release()}"'


def whole(answers: Sequence[Answer], outcomes: Sequence[Sequence[Outcome]]) -> Iterator[str]:
    """The body of a reply to all prompts: choice j of prompt i has the index i * n + j."""
    head = answers[0].head
    yield f'{envelope(head, stream=False)},{_FINGERPRINT},"choices":['
    index = 0
    for answer, of_answer in zip(answers, outcomes, strict=True):
        writer = logprobs_writer(answer)
        for choice, outcome in enumerate(of_answer):
            yield f'{"," if index else ""}{{"index":{index},'
            yield from _choice(answer, choice, outcome, writer)
            index += 1
    usage = usage_object(
        sum(answer.prompt_tokens for answer in answers),
        sum(outcome.tokens for of_answer in outcomes for outcome in of_answer),
        sum(answer.cached_tokens for answer in answers),
        answers[0].reasoning_tokens if head.reply.message.reasoning else None,
    )
    yield f'],"usage":{compact(usage)}'
    if head.reply.kind in CHATS:
        yield from _of_prompt(answers[0])
    yield "}"


def _choice(
    answer: Answer, choice: int, outcome: Outcome, writer: LogprobsWriter | None
) -> Iterator[str]:
    """A choice behind its index, with the closing brace."""
    reply = answer.head.reply
    is_chat = reply.kind in CHATS
    if is_chat:
        yield f'"message":{_message(answer, choice, outcome)},"logprobs":'
    else:
        yield f'"text":{encode_basestring(reply.prompt_text + outcome.text)},"logprobs":'
    if writer is None:
        yield "null"
    elif is_chat:
        yield from writer.value(answer.logprobs(choice))
    else:
        yield from writer.value(chain(echoed(answer), answer.logprobs(choice)))
    stop = compact(stop_reason(outcome.ending, answer.silent_ends))
    reason = FINISH_NAMES[outcome.ending.reason]
    if outcome.message is not None and outcome.message.calls_tools:
        reason = CALLS_TOOLS
    yield f',"finish_reason":"{reason}","stop_reason":{stop}'
    if reply.return_token_ids:
        yield from id_list("token_ids", answer.token_ids(choice))
    if not is_chat:
        yield from _of_prompt(answer)
    yield "}"


def _message(answer: Answer, choice: int, outcome: Outcome) -> str:
    text, found = encode_basestring(outcome.text), outcome.message
    if found is None:
        return f'{{"role":"assistant","content":{text},"refusal":null}}'
    if found.calls and not outcome.text:
        text = "null"
    fields = f'"role":"assistant","content":{text},"refusal":null'
    if found.reasoning:
        reasoning = encode_basestring(found.reasoning)
        fields += f',"reasoning_content":{reasoning},"reasoning":{reasoning}'
    if found.calls:
        calls = [
            {
                "id": call_id(answer.head.request_id, choice, index),
                **call_object(call.name, call.arguments, is_custom=call.is_custom),
            }
            for index, call in enumerate(found.calls)
        ]
        fields += f',"tool_calls":{compact(calls)}'
    return f"{{{fields}}}"


def _of_prompt(answer: Answer) -> Iterator[str]:
    """What is said of the prompt, as in vLLM: in a reply to one chat, but in each choice of completions, which may have
    several prompts.
    """
    yield from scores_of_prompt(answer)
    if answer.head.reply.return_token_ids:
        yield from id_list("prompt_token_ids", answer.prompt_ids or ())
