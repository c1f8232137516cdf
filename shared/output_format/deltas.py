"""What an answer is made of, in the order in which it is written."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple


class Content(NamedTuple):
    """More of the text."""

    text: str


class Reasoning(NamedTuple):
    """More of what the model thinks."""

    text: str


class CallBegin(NamedTuple):
    """A call begins: `call` counts the answer's from 0. `is_custom`: of a tool that takes one text."""

    call: int
    name: str
    is_custom: bool = False


class CallArguments(NamedTuple):
    """More of the JSON text of a call's arguments; of one that `is_custom` more of its input."""

    call: int
    text: str
    is_custom: bool = False


class CallEnd(NamedTuple):
    """A call is whole."""

    call: int


Delta = Content | Reasoning | CallBegin | CallArguments | CallEnd


def joined(deltas: Sequence[Delta]) -> list[Delta]:
    """The same, neighbouring texts of one kind as one."""
    if len(deltas) < 2:
        return list(deltas)
    found: list[Delta] = []
    for (kind, _), grouped in groupby(deltas, _kind):
        several: list[Any] = [*grouped]
        if kind in (CallBegin, CallEnd):
            found += several
            continue
        text = "".join([delta.text for delta in several])
        if kind is CallArguments:
            found.append(several[0]._replace(text=text))
        else:
            found.append(kind(text))
    return found


def _kind(delta: Delta) -> tuple[type, int]:
    return type(delta), 0 if isinstance(delta, Content | Reasoning) else delta.call
