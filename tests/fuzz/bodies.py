"""Bodies of requests: right ones, in which something is then made wrong."""

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

from tests.fuzz import uploads, values
from tests.fuzz.damage import any_field, as_json, break_inside, damaged, object_in
from tests.fuzz.fields import fields_of
from tests.fuzz.right import chats, messages_and_responses, other_servers, vectors


def body(draw: random.Random, route: str) -> bytes:
    """A body for a route: in turn right, with a field or a place inside made wrong, or with bytes changed."""
    if route == "/v1/files":
        return uploads.form(draw, _lines(draw))
    content = _right(draw, route)
    kind = draw.random()
    if kind < 0.1:
        return as_json(content)
    if kind < 0.15:
        return as_json(values.any_value(draw))
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        if draw.random() < 0.6:
            object_in(draw, content)[draw.choice(fields_of(route))] = any_field(draw)
        else:
            break_inside(draw, content)
    written = as_json(content)
    return damaged(draw, written) if draw.random() < 0.1 else written


def line(draw: random.Random, name: str) -> bytes:
    """A line of a batch's file for chat under this name, with a strange body; it may be no line."""
    route = "/v1/chat/completions"
    asked = body(draw, route).replace(b"\n", b" ")
    head = json.dumps({"custom_id": name, "method": "POST", "url": route}).encode()
    written = head[:-1] + b', "body": ' + asked + b"}"
    return damaged(draw, written).replace(b"\n", b" ") if draw.random() < 0.2 else written


def _lines(draw: random.Random) -> bytes:
    """A batch's file: some lines, in each of which something may be wrong."""
    return b"\n".join(line(draw, str(number)) for number in range(draw.randint(0, 5)))


def _of_batches(draw: random.Random, route: str) -> dict[str, Any]:
    return {
        "input_file_id": "file-" + draw.choice("0a") * 32,
        "endpoint": draw.choice(["/v1/chat/completions", "/v1/responses"]),
        "completion_window": draw.choice(["24h", "1s"]),
        "metadata": {"of": "fuzz"},
        "output_expires_after": {"anchor": "created_at", "seconds": 3600},
    }


def _of_message_batches(draw: random.Random, route: str) -> dict[str, Any]:
    names = [draw.choice(["a", "b-1", str(number)]) for number in range(draw.randint(1, 4))]
    params = [messages_and_responses.of_messages(draw, route) for _ in names]
    return {
        "requests": [
            {"custom_id": name, "params": one} for name, one in zip(names, params, strict=True)
        ]
    }


def _of_compaction(draw: random.Random, route: str) -> dict[str, Any]:
    asked = messages_and_responses.of_responses(draw, route)
    return {name: asked[name] for name in ("model", "input", "instructions") if name in asked}


def _of_adapters(draw: random.Random, route: str) -> dict[str, Any]:
    """What names an adapter; where it lies there is none."""
    return {
        "lora_name": draw.choice(["sql", values.MODEL, "a" * 300, "\x00"]),
        "lora_path": draw.choice(["sql", "../../etc", "/proc/self/fd/0", "\x00", "a/" * 3000]),
        "load_inplace": draw.choice([True, False, None]),
    }


# By the beginning of a path: the first that fits. All others are those of chats.
_MAKERS: Mapping[str, Callable[[random.Random, str], dict[str, Any]]] = {
    **dict.fromkeys(vectors.ROUTES, vectors.body),
    "/api/": other_servers.of_ollama,
    "/v1/batches": _of_batches,
    "/v1/load_lora_adapter": _of_adapters,
    "/v1/unload_lora_adapter": _of_adapters,
    "/v1/messages/batches": _of_message_batches,
    "/v1/messages": messages_and_responses.of_messages,
    "/v1/responses/compact": _of_compaction,
    "/v1/responses": messages_and_responses.of_responses,
    **dict.fromkeys(("/infer", "/v1/tokenizer", "/generate", "/v2/"), other_servers.body),
}


def _right(draw: random.Random, route: str) -> dict[str, Any]:
    if route == "/":
        return other_servers.body(draw, route)
    make = next((make for root, make in _MAKERS.items() if route.startswith(root)), chats.body)
    return make(draw, route)
