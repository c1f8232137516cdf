"""A choice's tokens as what they are made of: content, reasoning, calls of tools."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.gateway.model.output_forms import Form
from shared.output_format.deltas import (
    CallArguments,
    CallBegin,
    Content,
    Delta,
    Reasoning,
    joined,
)
from shared.output_format.fold import End, MessageFold
from shared.text.marked_text import MarkedText
from shared.text.stop_search import StopStrings
from shared.text.text_fold import TokenBytes
from tessera.scheduler.v1.queue_pb2 import RequestSpec


def call_id(request_id: str, choice: int, index: int) -> str:
    """The id of a call: the same at every gateway."""
    return f"call_{request_id}_{choice}_{index}"


@dataclass(slots=True)
class Call:
    """A call of a tool; `arguments` is the text of a JSON object, if the model wrote one, or a custom tool's input."""

    name: str
    arguments: str = ""
    is_custom: bool = False


@dataclass(slots=True)
class Message:
    """What a choice that has ended is made of, beside its content."""

    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    # It ended by itself and a call is whole.
    calls_tools: bool = False
    # All of it in order, its content too.
    deltas: Sequence[Delta] = ()

    @classmethod
    def of(cls, deltas: Sequence[Delta], calls_tools: bool) -> "Message":
        """All deltas as one."""
        message = cls(calls_tools=calls_tools, deltas=deltas)
        reasoning: list[str] = []
        arguments: list[list[str]] = []
        for delta in deltas:
            match delta:
                case Reasoning():
                    reasoning.append(delta.text)
                case CallBegin():
                    message.calls.append(Call(delta.name, is_custom=delta.is_custom))
                    arguments.append([])
                case CallArguments():
                    arguments[delta.call].append(delta.text)
        message.reasoning = "".join(reasoning)
        for call, texts in zip(message.calls, arguments, strict=True):
            call.arguments = "".join(texts)
        return message


class MessageText:
    """Folds tokens of one choice, as `TextFold` does; the text that it returns is the content. `take` has the rest."""

    def __init__(
        self,
        table: TokenBytes,
        head: RequestSpec,
        stops: StopStrings | None,
        form: Form,
        schemas: Mapping[str, Any],
    ) -> None:
        """`schemas`: of the tools' parameters, by name."""
        message, skips = head.reply.message, head.reply.skip_special_tokens
        self._text = MarkedText(
            table, skips, stops, head.sampling.include_stop_str_in_output, form.markers.chars
        )
        self._fold = MessageFold(
            form.calls,
            form.reasoning,
            form.markers,
            in_reasoning=message.in_reasoning,
            tools=schemas,
            single_call=message.single_call,
            custom={tool.name: tool.is_quoted for tool in message.custom_tools},
            hidden=form.special if skips else frozenset(),
        )
        self._hides_reasoning = message.hides_reasoning
        self._deltas: list[Delta] = []
        # Tokens in which the model thought, its markers among them.
        self.reasoning_tokens = 0

    @property
    def calls_tools(self) -> bool:
        """Whether a call is whole."""
        return self._fold.calls_closed > 0

    @property
    def held_bytes(self) -> int:
        """Bytes that may turn out to be a stop string."""
        return self._text.held_bytes

    def push(self, token_id: int) -> str:
        """Takes the next token, and returns the content that is certain now."""
        fold = self._fold
        thought = fold.in_reasoning
        content = self._sorted(fold.push(self._text.push(token_id)))
        self.reasoning_tokens += thought or fold.in_reasoning
        return content

    def finish(self, cut: int = 0, end: End = End.BY_ITSELF) -> str:
        """The content that is left. Raises ValueError for an impossible cut."""
        rest = self._sorted(self._fold.push(self._text.finish(cut)))
        return rest + self._sorted(self._fold.finish(end))

    def take(self) -> list[Delta]:
        """What has come since the last time, in order."""
        deltas, self._deltas = self._deltas, []
        return joined(deltas)

    def _sorted(self, deltas: Sequence[Delta]) -> str:
        content = ""
        for delta in deltas:
            if isinstance(delta, Reasoning) and self._hides_reasoning:
                continue
            self._deltas.append(delta)
            if isinstance(delta, Content):
                content += delta.text
        return content
