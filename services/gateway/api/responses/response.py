"""A response as one object."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from services.gateway.api.compact_json import compact
from services.gateway.api.part_list import Part, PartKind, parts_of
from services.gateway.following.answer import Answer, Outcome
from services.gateway.following.message import call_id
from tessera.common.v1.ending_pb2 import Ending, FinishReason
from tessera.scheduler.v1.queue_pb2 import RequestSpec

ID_PREFIX = "resp_"
QUEUED, IN_PROGRESS, COMPLETED, INCOMPLETE = "queued", "in_progress", "completed", "incomplete"
# Log-probabilities that are written at once.
_ENTRIES = 64
_STOP = FinishReason.FINISH_REASON_STOP
_PREFIXES: Mapping[PartKind, str] = {
    PartKind.TEXT: "msg",
    PartKind.REASONING: "rs",
    PartKind.CALL: "fc",
}


def response_object(
    head: RequestSpec,
    status: str,
    output: Sequence[Any] = (),
    usage: Mapping[str, Any] | None = None,
    error: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The response as far as it is known."""
    reason = {"reason": "max_output_tokens"} if status == INCOMPLETE else None
    return {
        "id": ID_PREFIX + head.request_id,
        "object": "response",
        "created_at": head.created_unix_s,
        "status": status,
        "error": error,
        "incomplete_details": reason,
        "model": head.model,
        "output": output,
        "usage": usage,
        "temperature": head.sampling.temperature,
        "top_p": head.sampling.top_p,
        **json.loads(head.reply.endpoint_json),
    }


def status_of(ending: Ending) -> str:
    """Of a response that has ended with its answer."""
    return COMPLETED if ending.reason == _STOP else INCOMPLETE


def whole_response(answer: Answer, outcome: Outcome) -> dict[str, Any]:
    """The response to an answer that has ended."""
    parts = parts_of(outcome, ended_itself=outcome.ending.reason == _STOP)
    forms = ItemForms(answer.head)
    output = [forms.item(part, part.text, is_begun=False) for part in parts]
    usage = usage_object(answer, outcome.tokens, answer.reasoning_tokens)
    return response_object(answer.head, status_of(outcome.ending), output, usage)


def written(response: Mapping[str, Any]) -> Iterator[str]:
    """As JSON, item by item."""
    yield "{"
    for index, (name, value) in enumerate(response.items()):
        yield f'{"," if index else ""}"{name}":'
        if name == "output":
            for place, one in enumerate(value):
                yield "," if place else "["
                yield from _written_item(one)
            yield "]" if value else "[]"
        else:
            yield compact(value)
    yield "}"


def _written_item(one: Mapping[str, Any]) -> Iterator[str]:
    """Log-probabilities, of which there may be many, in pieces."""
    [content, *_] = one.get("content") or [{}]
    entries = content.get("logprobs")
    if not entries:
        yield compact(one)
        return
    empty = {**one, "content": [{**content, "logprobs": []}]}
    before, name, behind = compact(empty).partition('"logprobs":[')  # quotes in texts are escaped
    yield before + name
    for start in range(0, len(entries), _ENTRIES):
        yield ("," if start else "") + compact(entries[start : start + _ENTRIES])[1:-1]
    yield behind


class ItemForms:
    """How the items of one response are written."""

    def __init__(self, head: RequestSpec) -> None:
        self._head = head
        # Clients that ask for a summary read thoughts there, and nowhere else.
        self.is_summary = json.loads(head.reply.endpoint_json)["reasoning"]["summary"] is not None

    def id(self, part: Part) -> str:
        """The name of an item: the same at every gateway."""
        prefix = "ctc" if part.is_custom else _PREFIXES[part.kind]
        return f"{prefix}_{self._head.request_id}_{part.index}"

    def item(
        self, part: Part, text: str, *, is_begun: bool, logprobs: Sequence[Any] = ()
    ) -> dict[str, Any]:
        """An item of the output: one that begins, or one that has ended with so much text. `logprobs`: of a message."""
        status = COMPLETED if part.is_whole else INCOMPLETE
        fields = {"id": self.id(part), "status": IN_PROGRESS if is_begun else status}
        if part.kind is PartKind.CALL:
            return {
                **fields,
                "type": "custom_tool_call" if part.is_custom else "function_call",
                "call_id": call_id(self._head.request_id, 0, part.call),
                "name": part.name,
                "input" if part.is_custom else "arguments": text,
            }
        held = [] if is_begun else [self.content_part(part, text, logprobs)]
        if part.kind is PartKind.TEXT:
            return {**fields, "type": "message", "role": "assistant", "content": held}
        summary, content = (held, []) if self.is_summary else ([], held)
        return {**fields, "type": "reasoning", "summary": summary, "content": content}

    def content_part(self, part: Part, text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
        """What a message or a thought holds."""
        if part.kind is PartKind.REASONING:
            return {"type": "summary_text" if self.is_summary else "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def usage_object(answer: Answer, tokens: int, reasoning: int) -> dict[str, Any]:
    """`tokens` of the answer, of which in `reasoning` the model thought."""
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": answer.prompt_tokens + tokens,
    }
