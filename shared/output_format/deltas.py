"""What an answer is made of, in the order in which it is written."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple


class Content(NamedTuple):
    """More of the text."""

    text: str


class Reasoning(NamedTuple):
    """More of what the model thinks."""

    text: str


class CallBegin(NamedTuple):
    """A call begins: `call` counts the answer's from 0."""

    call: int
    name: str


class CallArguments(NamedTuple):
    """More of the JSON text of a call's arguments."""

    call: int
    text: str


class CallEnd(NamedTuple):
    """A call is whole."""

    call: int


Delta = Content | Reasoning | CallBegin | CallArguments | CallEnd


def joined(deltas: Sequence[Delta]) -> list[Delta]:
    """The same, neighbouring texts of one kind as one."""
    if len(deltas) < 2:
        return list(deltas)
    found: list[Delta] = []
    for (kind, index), several in groupby(deltas, _kind):
        if kind in (CallBegin, CallEnd):
            found += several
            continue
        text = "".join([delta.text for delta in several])  # type: ignore[union-attr]
        found.append(CallArguments(index, text) if kind is CallArguments else kind(text))
    return found


def _kind(delta: Delta) -> tuple[type, int]:
    return type(delta), 0 if isinstance(delta, Content | Reasoning) else delta.call
