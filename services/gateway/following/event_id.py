"""Event ids: how much of an answer a client has that got an event and all before it.

    r_ab/17        17 tokens of the only choice are folded, and all the text they give is sent
    r_ab/9.12e     the same for two choices; of the second the finish is sent as well
    r_ab/9.12f     its text is sent to the end, its finish is not (where they are two events)
    r_ab/h2        the first two of the events that come before any token
    r_ab/17+2      17 tokens and the first two of the events that come behind them: of the next token, or of the end

What follows an event is a pure fold over the logs, so any gateway can go on from its id.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from shared.errors import InvalidRequest

# Numbers have one spelling, in ASCII: an id is compared by clients, which would take another one for another event.
_COUNT = r"(?:0|[1-9][0-9]{0,8})[ef]?"
_SHAPE = re.compile(
    rf"(r_[0-9a-f]{{8}}_[0-9a-f]{{32}})/(?:h(0|[1-9][0-9]{{0,3}})|({_COUNT}(?:\.{_COUNT})*)(?:\+([1-9][0-9]{{0,3}}))?)"
)

OPEN, TEXT_SENT, FINISH_SENT = "", "f", "e"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a client is: of each choice the number of tokens whose text it has, and whether it has
    the end (OPEN, TEXT_SENT or FINISH_SENT).
    """

    counts: tuple[int, ...]
    ends: tuple[str, ...]
    # How many of the events before any token it has; None is all of them.
    head_events: int | None = None
    # How many of the events it has that come behind those tokens, where a token has several.
    events_behind: int = 0

    @classmethod
    def beginning(cls, choices: int) -> "Progress":
        """The progress of a client that has nothing."""
        return cls((0,) * choices, (OPEN,) * choices, 0)


class EventIds:
    """The ids of one answer's events, from where its client is."""

    __slots__ = ("_places", "_prefix")

    def __init__(self, request_id: str, progress: Progress) -> None:
        self._prefix = f"{request_id}/"
        self._places = [
            f"{count}{end}" for count, end in zip(progress.counts, progress.ends, strict=True)
        ]

    def go_on(self, choice: int, count: int, end: str = OPEN) -> None:
        """Behind the next event a client has so many tokens of a choice, and maybe its end."""
        self._places[choice] = f"{count}{end}"

    def current(self) -> str:
        """The id of the next event, as far as all choices are then."""
        return f"{self._prefix}{'.'.join(self._places)}"

    def behind(self, choice: int, count: int, events: int) -> str:
        """The id of one of several events of a token: with it a client has `count` tokens and so many events more."""
        self.go_on(choice, count)
        return f"{self.current()}+{events}"

    def of_head(self, events: int) -> str:
        """The id of an event before any token: with it there are so many of them."""
        return f"{self._prefix}h{events}"


def read_event_id(after: str, request_id: str, choices: int, field: str = "after") -> Progress:
    """The progress that an event id of the request `request_id` stands for; "" is the beginning.

    Raises InvalidRequest, naming `field`, for what is no event id of this request.
    """
    if not after:
        return Progress.beginning(choices)
    shape = _SHAPE.fullmatch(after)
    if shape is None:
        raise _wrong(field, f"must be the id of an event, such as {request_id}/17")
    if shape[1] != request_id:
        raise _wrong(field, f"is the id of an event of another request, not of {request_id}")
    if shape[2] is not None:
        return Progress((0,) * choices, (OPEN,) * choices, int(shape[2]))
    places = shape[3].split(".")
    if len(places) != choices:
        raise _wrong(field, f"names {len(places)} choices; the request {request_id} has {choices}")
    return Progress(
        tuple(int(place.rstrip("ef")) for place in places),
        tuple(place[-1] if place[-1] in "ef" else OPEN for place in places),
        events_behind=int(shape[4] or 0),
    )


def check_progress(
    progress: Progress, tokens: Sequence[int], ended: Sequence[bool], most: int, field: str
) -> None:
    """Compares with what the log holds: `tokens` of each choice, whether it has `ended`, and the
    `most` that it may have. More than there are yet is allowed: a Redis that came back without its
    last second catches up.

    Raises InvalidRequest for what can never come true.
    """
    for count, end, there, is_whole in zip(
        progress.counts, progress.ends, tokens, ended, strict=True
    ):
        if count > (there if is_whole else most) or (end and is_whole and count != there):
            raise _wrong(field, "names tokens that this answer does not have")


def _wrong(field: str, message: str) -> InvalidRequest:
    return InvalidRequest("INVALID_EVENT_ID", f"{field} {message}", field=field)
