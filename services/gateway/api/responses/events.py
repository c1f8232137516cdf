"""A response as a stream of events."""

from collections.abc import Mapping, Sequence
from typing import Any

from services.gateway.api.part_list import Part, PartKind, Step
from services.gateway.api.part_stream import Event, PartStream
from services.gateway.api.responses.errors import error_value, failure_value
from services.gateway.api.responses.response import (
    COMPLETED,
    IN_PROGRESS,
    ItemForms,
    response_object,
    status_of,
    usage_object,
    whole_response,
)
from services.gateway.api.server_sent_events import AFTER_COMMENT, COMMENT, COMMENT_BESIDE_IDS
from services.gateway.api.token_scores import ScoreEntries
from services.gateway.following.answer import Answer, Outcome, Piece
from shared.errors import Cancelled, ServingError
from tessera.common.v1.ending_pb2 import Ending

# Above the number of any event.
_ALL = 1 << 62
_GROWING: Mapping[PartKind, str] = {
    PartKind.TEXT: "response.output_text",
    PartKind.REASONING: "response.reasoning_text",
    PartKind.CALL: "response.function_call_arguments",
}


class ResponseWriter(PartStream):
    """The events of one response, numbered from 0; those that are joined have the last one's number."""

    def __init__(self, answer: Answer, with_ids: bool, after: int = -1) -> None:
        super().__init__(answer, with_ids, after)
        self.ping = COMMENT_BESIDE_IDS if with_ids else COMMENT
        self.after_ping = b"" if with_ids else AFTER_COMMENT
        self._head = answer.head
        self._forms = ItemForms(answer.head)
        self._entries = ScoreEntries(
            answer.table, skips_special=answer.head.reply.skip_special_tokens
        )
        # The whole of it, once that is known.
        self.response: Mapping[str, Any] | None = None

    def first_events(self) -> Sequence[Event]:
        """That the response is made, and begins."""
        response = response_object(self._head, IN_PROGRESS)
        return (
            Event("response.created", {"response": response}),
            Event("response.in_progress", {"response": response}),
        )

    def part_events(self, step: Step, part: Part, text: str) -> Sequence[Event]:
        """An item begins, grows, ends; one that is no call has one part of content."""
        place = {"output_index": part.index}
        within: dict[str, Any] = {"item_id": self._forms.id(part), **place}
        growing, held = _GROWING[part.kind], "response.content_part"
        if part.is_custom:
            growing = "response.custom_tool_call_input"
        if part.kind is PartKind.REASONING and self._forms.is_summary:
            growing, held = "response.reasoning_summary_text", "response.reasoning_summary_part"
            within["summary_index"] = 0
        elif part.kind is not PartKind.CALL:
            within["content_index"] = 0
        if step is Step.GROWS:
            return (Event(f"{growing}.delta", within, part, text),)
        is_begun = step is Step.BEGINS
        whole = "" if is_begun else part.text
        scores = [] if is_begun else self._entries.listed(part.logprobs)
        one = self._forms.item(part, whole, is_begun=is_begun, logprobs=scores)
        shown = {**place, "item": one}
        if is_begun:
            events = [Event("response.output_item.added", shown)]
        else:
            events = [Event(f"{growing}.done", {**within, **_done(part, whole, scores)})]
        if part.kind is not PartKind.CALL:
            name = f"{held}.{'added' if is_begun else 'done'}"
            shown_part = self._forms.content_part(part, whole, scores)
            events.append(Event(name, {**within, "part": shown_part}))
        if not is_begun:
            events.append(Event("response.output_item.done", shown))
        return events

    def last_events(self, ending: Ending, *, calls_tools: bool) -> Sequence[Event]:
        """The whole response."""
        listed = self._entries.listed
        output = [
            self._forms.item(part, part.text, is_begun=False, logprobs=listed(part.logprobs))
            for part in self.parts.parts
        ]
        usage = usage_object(self.answer, self.tokens, self.reasoning_tokens)
        status = status_of(ending)
        response = self.response = response_object(self._head, status, output, usage)
        name = "response.completed" if status == COMPLETED else "response.incomplete"
        return (Event(name, {"response": response}),)

    def error_event(self, error: ServingError) -> Event:
        """That the response failed, or, where it may go on elsewhere or was cancelled, the error alone."""
        if not self.answer.broke_off or isinstance(error, Cancelled):
            value = error_value(error)
            return Event("error", {name: value[name] for name in ("code", "message", "param")})
        response = response_object(self._head, "failed", error=failure_value(error))
        return Event("response.failed", {"response": response})

    def content(self, event: Event, number: int) -> Mapping[str, Any]:
        """With its type and number."""
        content = {"type": event.name, "sequence_number": number, **event.fields}
        if event.text is not None:
            content["delta"] = event.text
            if event.part is not None and event.part.kind is PartKind.TEXT:
                content["logprobs"] = self._entries.listed(event.logprobs)
        return content


def ended_response(answer: Answer, outcome: Outcome) -> Mapping[str, Any]:
    """The response to an answer that has ended."""
    if not answer.head.sampling.HasField("logprobs"):
        return whole_response(answer, outcome)
    # Whose log-probabilities stand in what part is known token by token. No event is written.
    writer = ResponseWriter(answer, with_ids=False, after=_ALL)
    writer.piece(Piece("", [*answer.token_ids(0)], outcome.tokens, outcome.ending))
    assert writer.response is not None
    return writer.response


def _done(part: Part, text: str, logprobs: Sequence[Any]) -> Mapping[str, Any]:
    if part.is_custom:
        return {"input": text}
    if part.kind is PartKind.CALL:
        return {"name": part.name, "arguments": text}
    return {"text": text, "logprobs": logprobs} if part.kind is PartKind.TEXT else {"text": text}
