"""Bodies of OpenAI's chats, completions and tokenizing."""

import random
from typing import Any

from tests.fuzz import forms, values
from tests.fuzz.right.pictures import picture_part
from tests.fuzz.values import MODEL


def body(draw: random.Random, route: str) -> dict[str, Any]:
    """For a route of chats, completions or tokenizing."""
    if route.endswith("/detokenize"):
        return {"model": MODEL, "tokens": [draw.randrange(300) for _ in range(8)]}
    if route.endswith("/tokenize") and draw.random() < 0.5:
        return {"model": MODEL, "prompt": "some words", "return_token_strs": draw.random() < 0.5}
    few: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": draw.randint(1, 4),
        "temperature": draw.choice([0, 1]),
    }
    if draw.random() < 0.3:
        few["stream"] = True
    if route.endswith("/completions") and "chat" not in route:
        return {**few, **_prompt(draw)}
    if route.endswith("/tokenize"):
        few = {"model": MODEL}
    if draw.random() < 0.3:
        few |= {"tools": _tools(draw), "tool_choice": draw.choice(["none", "auto", "required"])}
    elif draw.random() < 0.3:
        few |= _form(draw)
    window = draw.choice([None, 1, 40, 4096])
    return {**few, "max_window_size": window, "messages": conversation(draw)}


def _prompt(draw: random.Random) -> dict[str, Any]:
    """The prompt of a completion, or several."""
    if draw.random() < 0.2:
        data = {"image": [values.url(draw), values.url(draw)]}
        marked = draw.choice(["words", "<|image_pad|> <|image_pad|>"])
        return {"prompt": marked, "multi_modal_data": data}
    return {"prompt": draw.choice(["some words", [5, 6, 7], ["one", "two"], [[5, 6], [7]]])}


def _form(draw: random.Random) -> dict[str, Any]:
    kind = draw.choice(["json", "regex", "grammar", "structural_tag"])
    made = forms.MAKERS[kind](draw)
    if draw.random() < 0.5:
        return {"structured_outputs": {kind: made}}
    if kind == "structural_tag":
        return {"response_format": made}
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": made}}}


def conversation(draw: random.Random) -> list[dict[str, Any]]:
    """Messages, with pictures and calls of tools."""
    content: Any = "What is this?"
    if draw.random() < 0.4:
        content = [{"type": "text", "text": content}, picture_part(draw)]
        if draw.random() < 0.2:
            for part in content:
                del part["type"]
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    if draw.random() < 0.3:
        messages.insert(0, {"role": "system", "content": "Be brief."})
    if draw.random() < 0.2:
        function = {"name": "weather", "arguments": _arguments(draw)}
        call = {"id": "call_1", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": "call_1", "content": "sunny"})
    return messages


def _arguments(draw: random.Random) -> Any:
    return draw.choice(['{"city": "x"}', "{", {}, forms.json_text(draw)])


def _tools(draw: random.Random) -> list[dict[str, Any]]:
    schema = {"type": "object", "properties": {"city": forms.schema(draw)}}
    function = {"name": "weather", "description": "What it is like", "parameters": schema}
    custom = {"name": "run", "format": forms.input_format(draw, is_nested=True)}
    tools = [{"type": "function", "function": function} for _ in range(draw.randint(1, 3))]
    return [*tools, {"type": "custom", "custom": custom}] if draw.random() < 0.5 else tools
