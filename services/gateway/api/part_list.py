"""An answer as its parts, one after another: text, reasoning, calls of tools."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from services.gateway.following.answer import Outcome
from services.gateway.following.logprobs import TokenLogprob
from shared.output_format.deltas import CallArguments, CallBegin, CallEnd, Content, Delta, Reasoning


class PartKind(Enum):
    """What a part is."""

    TEXT = auto()
    REASONING = auto()
    CALL = auto()


@dataclass(slots=True)
class Part:
    """One part; of a call `text` is its arguments, `name` the tool's, and `call` counts the answer's calls from 0."""

    index: int
    kind: PartKind
    call: int = 0
    name: str = ""
    # Of a custom tool's call: `text` is its input.
    is_custom: bool = False
    # It ended before the answer did, or with an answer that the model ended by itself.
    is_whole: bool = False
    texts: list[str] = field(default_factory=list)
    # Of a text: the scores of its tokens, where they are known.
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.texts)


class Step(Enum):
    """What happens to a part."""

    BEGINS = auto()
    GROWS = auto()
    ENDS = auto()


class PartList:
    """Makes parts of deltas."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._open: Part | None = None

    def take(self, deltas: Iterable[Delta]) -> Iterator[tuple[Step, Part, str]]:
        """What they do to parts, with the text by which one grows. It must be read to its end."""
        for delta in deltas:
            match delta:
                case Content(text):
                    yield from self._grow(PartKind.TEXT, text)
                case Reasoning(text):
                    yield from self._grow(PartKind.REASONING, text)
                case CallBegin(call, name, is_custom):
                    yield from self.end(is_whole=True)
                    begun = Part(len(self.parts), PartKind.CALL, call, name, is_custom)
                    yield from self._begin(begun)
                case CallArguments(_, text):
                    yield from self._grow(PartKind.CALL, text)
                case CallEnd():
                    yield from self.end(is_whole=True)

    def end(self, *, is_whole: bool) -> Iterator[tuple[Step, Part, str]]:
        """Ends the part that is open. `is_whole`: nothing of it is missing."""
        part, self._open = self._open, None
        if part is not None:
            part.is_whole = is_whole
            yield Step.ENDS, part, ""

    def _begin(self, part: Part) -> Iterator[tuple[Step, Part, str]]:
        self.parts.append(part)
        self._open = part
        yield Step.BEGINS, part, ""

    def _grow(self, kind: PartKind, text: str) -> Iterator[tuple[Step, Part, str]]:
        if self._open is None or self._open.kind != kind:
            yield from self.end(is_whole=True)
            yield from self._begin(Part(len(self.parts), kind))
        assert self._open is not None
        self._open.texts.append(text)
        yield Step.GROWS, self._open, text


def parts_of(outcome: Outcome, *, ended_itself: bool) -> list[Part]:
    """The parts of a choice that has ended. `ended_itself`: the model ended it, so that its last part is whole."""
    found = PartList()
    deltas: Iterable[Delta] = (Content(outcome.text),) if outcome.text else ()
    if outcome.message is not None:
        deltas = outcome.message.deltas
    for _ in (*found.take(deltas), *found.end(is_whole=ended_itself)):
        pass
    return found.parts
