"""Prompts whose vectors, classes or scores are asked for, as bodies of requests with many of them each."""

import base64
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.launcher.offline.prompts.prompts import CHAT, is_ids, read_conversation, read_prompt

EMBEDDINGS = "/v1/embeddings"
CLASSES = "/classify"
SCORES = "/score"

# Prompts of one request; the server takes twice as many.
_MOST = 1024
_PLACE = re.compile(r"\A(?:input|queries|documents)(?:\[(\d+)\])?")
_NO_MEDIA = "multi_modal_data is not taken here: show pictures in a conversation"


@dataclass(frozen=True, slots=True)
class PooledRequest:
    """Neighbouring prompts, the first of them number `start`."""

    start: int
    count: int
    body: Mapping[str, Any] = field(repr=False)

    def renamed(self, message: str) -> str:
        """An error's message about the prompts as they were given: of one prompt alone, or of the one at its place."""
        found = _PLACE.match(message)
        if found is None or (found[1] is None and self.count > 1):
            return message
        return f"prompts[{self.start + int(found[1] or 0)}]{message[found.end() :]}"


def read_pooled(prompts: Any) -> list[PooledRequest]:
    """One prompt or several, in their order: texts, lists of token ids, dicts of one of these, or conversations (lists
    of messages, which may show pictures). Raises ValueError or TypeError.
    """
    is_one = isinstance(prompts, str | Mapping) or is_ids(prompts) or _is_conversation(prompts)
    found: list[PooledRequest] = []
    waiting: list[Any] = []
    listed = [prompts] if is_one else list(prompts)
    for index, prompt in enumerate(listed):
        given = _read(prompt)
        is_other = waiting and type(given) is not type(waiting[0])
        if is_other or len(waiting) == _MOST or isinstance(given, Mapping):
            found += _of_inputs(waiting, index)
            waiting = []
        if isinstance(given, Mapping):
            found.append(PooledRequest(index, 1, given))
        else:
            waiting.append(given)
    return found + _of_inputs(waiting, len(listed))


def read_pairs(data_1: Any, data_2: Any) -> list[PooledRequest]:
    """One text or as many as there are others. Raises ValueError or TypeError."""
    queries, documents = _texts("data_1", data_1), _texts("data_2", data_2)
    if len(queries) not in (1, len(documents)):
        raise ValueError(
            f"data_1 must be one text, or one for each of data_2: it has {len(queries)}, data_2 {len(documents)}"
        )
    found = []
    for start in range(0, len(documents), _MOST):
        some = documents[start : start + _MOST]
        asking = queries if len(queries) == 1 else queries[start : start + _MOST]
        found.append(PooledRequest(start, len(some), {"queries": asking, "documents": some}))
    return found


def vector_of(item: Mapping[str, Any]) -> Sequence[float]:
    """The numbers of an entry that came as base64 of little-endian float32."""
    content = base64.b64decode(item["embedding"])
    return struct.unpack(f"<{len(content) // 4}f", content)


def _of_inputs(inputs: list[Any], end: int) -> list[PooledRequest]:
    if not inputs:
        return []
    return [PooledRequest(end - len(inputs), len(inputs), {"input": inputs})]


def _is_conversation(value: Any) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return is_list and bool(value) and isinstance(value[0], Mapping) and "role" in value[0]


def _read(prompt: Any) -> Any:
    """A text, a list of token ids, or a body with a conversation."""
    if _is_conversation(prompt):
        read = read_conversation(prompt)
        assert read.path == CHAT
        return read.body
    given = read_prompt(prompt).body
    if "multi_modal_data" in given:
        raise ValueError(_NO_MEDIA)
    return given["prompt"]


def _texts(name: str, given: Any) -> list[str]:
    listed = [given] if isinstance(given, str) else list(given)
    if not all(isinstance(one, str) for one in listed):
        raise TypeError(f"{name} must be a text or a list of texts")
    return listed
