"""Streams of server-sent events about the parts of an answer, which begin, grow and end.

Each token has its own events. Those of several tokens that come together are the same, but for neighbouring texts of
one part, which come as one. So what follows an event depends on the log alone, also between the events of one token,
and any gateway can go on from there.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.gateway.api.compact_json import compact
from services.gateway.api.part_list import Part, PartList, Step
from services.gateway.api.server_sent_events import MEDIA_TYPE
from services.gateway.api.token_scores import TextScores
from services.gateway.following.answer import Answer, Piece
from services.gateway.following.answer_fold import MessagePiece
from services.gateway.following.event_id import FINISH_SENT, EventIds
from services.gateway.following.logprobs import TokenLogprob
from shared.errors import ServingError
from shared.output_format.deltas import Content, Delta
from tessera.common.v1.ending_pb2 import Ending, FinishReason

_STOP = FinishReason.FINISH_REASON_STOP


@dataclass(slots=True)
class Event:
    """One event. `text` is what a part grows by."""

    name: str
    fields: Mapping[str, Any]
    part: Part | None = None
    text: str | None = None
    # Of the tokens that gave this text.
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def goes_on(self, last: "Event") -> bool:
        """Whether it is more of the same text."""
        return self.text is not None and last.text is not None and self.part is last.part


@dataclass(slots=True)
class _Written:
    """An event to be written, the number of the last one that it stands for, and the id behind that."""

    event: Event
    number: int
    place: str


class PartStream:
    """The stream of an answer of one choice. An API says what its events are."""

    media_type = MEDIA_TYPE
    ping = after_ping = b""

    def __init__(self, answer: Answer, with_ids: bool, after: int = -1) -> None:
        """`with_ids`: events have ids. Events up to the number `after`, counted from 0, are left out."""
        self.answer = answer
        self.parts = PartList()
        self.reasoning_tokens = 0
        self._with_ids = with_ids
        self._after = after
        self._number = 0  # of the next event
        self._fold = answer.fold(0, with_logprobs=True)
        self._scores = TextScores()
        self._ids = EventIds(answer.head.request_id, answer.progress)
        self._has_caught_up = False
        # Events that the client has of what comes behind the tokens that it has.
        self._has = answer.progress.events_behind
        self._out: list[_Written] = []

    def accepted(self) -> bytes:
        """The events before any token, as far as the client does not have them."""
        has = self.answer.progress.head_events
        for count, event in enumerate(self.first_events(), 1):
            self._add(event, self._ids.of_head(count), is_new=has is not None and count > has)
        return self._written()

    def first(self) -> Iterator[str]:
        """Nothing: `accepted` gives all that comes before tokens."""
        return iter(())

    def piece(self, piece: Piece) -> bytes:
        """The events of each of its tokens, and of the end."""
        if not self._has_caught_up:
            self._has_caught_up = True
            for token in self.answer.token_ids(0)[: self.answer.progress.counts[0]]:
                self._number += len(self._events([token], None))
        for token in piece.token_ids:
            self._step([token], None)
        if piece.ending is not None:
            self._step([], piece.ending)
        return self._written()

    def end(self) -> bytes:
        """Nothing: the last event came with the last piece."""
        return b""

    def failure(self, error: ServingError) -> bytes:
        """The event with the error."""
        self._add(self.error_event(error), "", is_new=True)
        return self._written()

    @abstractmethod
    def first_events(self) -> Sequence[Event]:
        """Those before any token."""

    @abstractmethod
    def part_events(self, step: Step, part: Part, text: str) -> Sequence[Event]:
        """Those of what happens to a part. Where it grows: one, with the text."""

    @abstractmethod
    def last_events(self, ending: Ending, *, calls_tools: bool) -> Sequence[Event]:
        """Those behind the last part."""

    @abstractmethod
    def error_event(self, error: ServingError) -> Event:
        """That of a failure."""

    @abstractmethod
    def content(self, event: Event, number: int) -> Mapping[str, Any]:
        """What an event says; `number` counts the events of the stream from 0."""

    @property
    def tokens(self) -> int:
        """Tokens folded so far."""
        return self._fold.count

    def _step(self, tokens: list[int], ending: Ending | None) -> None:
        """One token, or the end."""
        before = self._fold.count
        events = self._events(tokens, ending)
        for count, event in enumerate(events, 1):
            place = ""
            if count < len(events):
                place = self._ids.behind(0, before, count)
            elif ending is not None:
                self._ids.go_on(0, before, FINISH_SENT)
                place = self._ids.current()
            else:
                self._ids.go_on(0, self._fold.count)
                place = self._ids.current()
            self._add(event, place, is_new=count > self._has)
        self._has = 0

    def _events(self, tokens: list[int], ending: Ending | None) -> list[Event]:
        count, thought = self._fold.count, self._fold.reasoning_tokens
        records = self.answer.records(0, count, count + len(tokens))
        piece = self._fold.push(tokens, ending, records)
        is_thought = self._fold.reasoning_tokens > thought
        self._scores.push(piece.logprobs, is_thought=is_thought)
        deltas: Sequence[Delta] = (Content(piece.text),) if piece.text else ()
        if isinstance(piece, MessagePiece):
            deltas = piece.deltas
            self.reasoning_tokens = self._fold.reasoning_tokens
        events: list[Event] = []
        for step, part, text in self.parts.take(deltas):
            found = self._scores.take(step, part)
            part.logprobs += found
            events += self.part_events(step, part, text)
            if found:
                events[-1].logprobs = found
        if ending is not None:
            for step, part, text in self.parts.end(is_whole=ending.reason == _STOP):
                events += self.part_events(step, part, text)
            calls_tools = isinstance(piece, MessagePiece) and piece.calls_tools
            events += self.last_events(ending, calls_tools=calls_tools)
        return events

    def _add(self, event: Event, place: str, *, is_new: bool) -> None:
        number = self._number
        self._number += 1
        if not is_new or number <= self._after:
            return
        if self._out and event.goes_on(self._out[-1].event):
            last = self._out[-1]
            assert last.event.text is not None and event.text is not None
            last.event.text += event.text
            last.event.logprobs = [*last.event.logprobs, *event.logprobs]
            last.number, last.place = number, place
        else:
            self._out.append(_Written(event, number, place))

    def _written(self) -> bytes:
        out, self._out = self._out, []
        frames = []
        for one in out:
            place = f"id: {one.place}\n" if self._with_ids and one.place else ""
            content = compact(self.content(one.event, one.number))
            frames.append(f"event: {one.event.name}\n{place}data: {content}\n\n")
        return "".join(frames).encode()
