"""Anthropic's replies: one message, or the events of one."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from services.gateway.api.anthropic.errors import error_content
from services.gateway.api.compact_json import compact
from services.gateway.api.part_list import Part, PartKind, Step, parts_of
from services.gateway.api.part_stream import Event, PartStream
from services.gateway.following.answer import Answer, Outcome
from services.gateway.following.message import call_id
from shared.errors import ServingError
from tessera.common.v1.ending_pb2 import Ending, FinishReason
from tessera.scheduler.v1.queue_pb2 import RequestSpec

ID_PREFIX = "msg_"
_STOP = FinishReason.FINISH_REASON_STOP
# The type of a delta, and its field.
_DELTAS: Mapping[PartKind, tuple[str, str]] = {
    PartKind.TEXT: ("text_delta", "text"),
    PartKind.REASONING: ("thinking_delta", "thinking"),
    PartKind.CALL: ("input_json_delta", "partial_json"),
}


class MessageWriter(PartStream):
    """The events of one message."""

    ping = b'event: ping\ndata: {"type":"ping"}\n\n'

    def first_events(self) -> Sequence[Event]:
        """That the message begins."""
        usage = _usage(self.answer.prompt_tokens, 0, 0)
        message = {**_envelope(self.answer.head), "content": [], **_END, "usage": usage}
        return (Event("message_start", {"message": message}),)

    def part_events(self, step: Step, part: Part, text: str) -> Sequence[Event]:
        """A block begins, grows, ends."""
        fields: dict[str, Any] = {"index": part.index}
        if step is Step.ENDS:
            end = Event("content_block_stop", fields)
            if part.kind is not PartKind.REASONING:
                return (end,)
            signed = {"type": "signature_delta", "signature": _signature(self.answer, part)}
            return (Event("content_block_delta", {**fields, "delta": signed}), end)
        if step is Step.GROWS:
            return (Event("content_block_delta", fields, part, text),)
        fields["content_block"] = _block(self.answer, part, "")
        return (Event("content_block_start", fields),)

    def last_events(self, ending: Ending, *, calls_tools: bool) -> Sequence[Event]:
        """How it ended, and that it is whole."""
        cached = self.answer.cached_tokens
        usage = _usage(self.answer.prompt_tokens, cached, self.tokens)
        if self.answer.head.reply.message.reasoning:
            usage["output_tokens_details"] = {"thinking_tokens": self.reasoning_tokens}
        delta = _end(ending, calls_tools=calls_tools)
        return (
            Event("message_delta", {"delta": delta, "usage": usage}),
            Event("message_stop", {}),
        )

    def error_event(self, error: ServingError) -> Event:
        """The error, as a response has it."""
        return Event("error", error_content(error))

    def content(self, event: Event, number: int) -> Mapping[str, Any]:
        """With its type."""
        content = {"type": event.name, **event.fields}
        if event.part is not None:
            kind, field = _DELTAS[event.part.kind]
            content["delta"] = {"type": kind, field: event.text}
        return content


def whole(answer: Answer, outcome: Outcome) -> Iterator[str]:
    """The reply to a request that is not streamed."""
    calls_tools = outcome.message is not None and outcome.message.calls_tools
    yield f'{compact(_envelope(answer.head))[:-1]},"content":['
    for part in parts_of(outcome, ended_itself=outcome.ending.reason == _STOP):
        yield f"{',' if part.index else ''}{_written(answer, part)}"
    usage = _usage(answer.prompt_tokens, answer.cached_tokens, outcome.tokens)
    if answer.head.reply.message.reasoning:
        usage["output_tokens_details"] = {"thinking_tokens": answer.reasoning_tokens}
    rest = {**_end(outcome.ending, calls_tools=calls_tools), "usage": usage}
    yield f"],{compact(rest)[1:]}"


def _envelope(head: RequestSpec) -> Mapping[str, Any]:
    return {
        "id": ID_PREFIX + head.request_id,
        "type": "message",
        "role": "assistant",
        "model": head.model,
    }


_END: Mapping[str, Any] = {"stop_reason": None, "stop_sequence": None}


def _end(ending: Ending, *, calls_tools: bool) -> Mapping[str, Any]:
    if ending.reason != _STOP:
        return {**_END, "stop_reason": "max_tokens"}
    if calls_tools:
        return {**_END, "stop_reason": "tool_use"}
    if ending.stop:
        return {"stop_reason": "stop_sequence", "stop_sequence": ending.stop}
    return {**_END, "stop_reason": "end_turn"}


def _usage(prompt: int, cached: int, completion: int) -> dict[str, Any]:
    """Tokens of the prompt that were found in a cache are counted by themselves."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": completion,
    }


def _block(answer: Answer, part: Part, text: str) -> Mapping[str, Any]:
    """A block with so much of its text; a call, which has none, begins with no arguments."""
    match part.kind:
        case PartKind.TEXT:
            return {"type": "text", "text": text}
        case PartKind.REASONING:
            return {"type": "thinking", "thinking": text, "signature": ""}  # it comes at the end
        case PartKind.CALL:
            name = call_id(answer.head.request_id, 0, part.call)
            return {"type": "tool_use", "id": name, "name": part.name, "input": {}}


def _signature(answer: Answer, part: Part) -> str:
    """A name of the thought. Clients send back none that has no signature."""
    return f"{answer.head.request_id}_{part.index}"


def _written(answer: Answer, part: Part) -> str:
    """A whole block as JSON, in which what a call is made with is as the model wrote it."""
    block = dict(_block(answer, part, part.text))
    if part.kind is PartKind.REASONING:
        block["signature"] = _signature(answer, part)
    if part.kind is not PartKind.CALL:
        return compact(block)
    del block["input"]
    return f'{compact(block)[:-1]},"input":{_input(part.text)}}}'


def _input(arguments: str) -> str:
    """The JSON of an object; of an empty one where they are none, as those of a call that was cut off."""
    try:
        is_object = isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        is_object = False
    return arguments if is_object else "{}"
