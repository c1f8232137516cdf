"""Streams of server-sent events, taken apart."""

import json
from collections import defaultdict
from typing import Any, NamedTuple

ASK_FOR_IDS = {"X-Tessera-Event-Ids": "1"}


def events(text: str) -> list[dict[str, Any]]:
    """The objects in a stream of events, `[DONE]` checked and left out."""
    data = _data(text)
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]


def unended_events(text: str) -> list[dict[str, Any]]:
    """The objects in a stream of events whose API ends it with its last object."""
    return [json.loads(item) for item in _data(text)]


def _data(text: str) -> list[str]:
    return [line[6:] for line in text.split("\n") if line.startswith("data: ")]


def event_ids(text: str) -> list[str]:
    """The ids of a stream's events."""
    return [line[4:] for line in text.split("\n") if line.startswith("id: ")]


def texts_of(chunks: list[dict[str, Any]]) -> dict[int, str]:
    """The text of each choice, whole or in chunks, of chats and completions."""
    texts: dict[int, str] = defaultdict(str)
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        text = choice.get("text") or choice.get("delta", {}).get("content") or ""
        texts[choice["index"]] += text
    return dict(texts)


def with_ids(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The id and the object of each event, `[DONE]` left out."""
    found = []
    for event in text.split("\n\n"):
        lines = [line for line in event.split("\n") if not line.startswith(":")]
        fields = dict(line.split(": ", 1) for line in lines if line)
        if fields.get("data", "[DONE]") != "[DONE]":
            found.append((fields.get("id", ""), json.loads(fields["data"])))
    return found


def merged(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The chunks as one, however their tokens are spread over them."""
    choices: dict[int, dict[str, Any]] = {}
    rest: dict[str, Any] = {}
    for chunk in chunks:
        rest |= {name: value for name, value in chunk.items() if name != "choices"}
        for choice in chunk["choices"]:
            into = choices.setdefault(choice["index"], {})
            for name, value in choice.items():
                _add(into, name, value)
    return {"choices": choices, **rest}


def _add(into: dict[str, Any], name: str, value: Any) -> None:
    if isinstance(value, dict):
        inner = into[name] = into.get(name) or {}
        for key, item in value.items():
            _add(inner, key, item)
    elif isinstance(value, (str, list)) and name in into and into[name] is not None:
        into[name] = into[name] + value
    elif value is not None or name not in into:
        into[name] = value


class NamedEvent(NamedTuple):
    """An event with a name: its id, empty for none, and its object."""

    name: str
    event_id: str
    content: dict[str, Any]


def named_events(text: str) -> list[NamedEvent]:
    """The events of a stream in which each has a name, which its object says too. Nothing is left over."""
    found = []
    *blocks, rest = text.split("\n\n")
    assert rest in ("", ": ping\n")
    for block in blocks:
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        fields = dict(line.split(": ", 1) for line in lines)
        if fields:
            content = json.loads(fields["data"])
            assert content["type"] == fields["event"]
            found.append(NamedEvent(fields["event"], fields.get("id", ""), content))
    return found
