"""Streams of server-sent events, taken apart."""

import json
from collections import defaultdict
from typing import Any


def events(text: str) -> list[dict[str, Any]]:
    """The objects in a stream of events, `[DONE]` checked and left out."""
    data = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]


def event_ids(text: str) -> list[str]:
    """The ids of a stream's events."""
    return [line[4:] for line in text.split("\n") if line.startswith("id: ")]


def texts_of(chunks: list[dict[str, Any]]) -> dict[int, str]:
    """The text of each choice, whole or in chunks, of either door."""
    texts: dict[int, str] = defaultdict(str)
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        told = choice.get("text") or choice.get("delta", {}).get("content") or ""
        texts[choice["index"]] += told
    return dict(texts)
