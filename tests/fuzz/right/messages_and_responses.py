"""Bodies of Anthropic's Messages and OpenAI's Responses."""

import base64
import random
from typing import Any

from tests.fuzz import forms, values
from tests.fuzz.right.pictures import file_id, picture_file
from tests.fuzz.values import MODEL


def of_messages(draw: random.Random, route: str) -> dict[str, Any]:
    """For Messages, or for counting their tokens."""
    text = {"type": "text", "text": "What is this?"}
    picture = base64.b64encode(picture_file(draw)).decode()
    image = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": picture},
    }
    of_url = {"type": "image", "source": {"type": "url", "url": values.url(draw)}}
    of_file = {"type": "image", "source": {"type": "file", "file_id": file_id(draw)}}
    told = draw.choice([{"type": "text", "data": "x"}, {"type": "content", "content": [text]}])
    document = {"type": "document", "source": told, "title": "y"}
    search = {"type": "search_result", "source": "z", "content": [text]}
    call = {"type": "tool_use", "id": "c", "name": "weather", "input": {"city": "x"}}
    result = {
        "type": "tool_result",
        "tool_use_id": "c",
        "content": draw.choice(["sunny", [text, image], [document, search]]),
    }
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    messages: list[dict[str, Any]] = [
        {
            "role": "user",
            "content": draw.choice(
                ["Hi", [text], [text, image, of_url], [of_file], [document, search]]
            ),
        }
    ]
    if draw.random() < 0.4:
        messages.append({"role": "assistant", "content": [thought, text, call]})
        messages.append({"role": "user", "content": [result, text]})
    if draw.random() < 0.2:
        messages.append({"role": "assistant", "content": "It is"})
    body: dict[str, Any] = {"model": MODEL, "messages": messages}
    if draw.random() < 0.3:
        body["system"] = draw.choice(["Be brief.", [text]])
    if draw.random() < 0.3:
        body["tools"] = [{"name": "weather", "input_schema": forms.schema(draw)}]
        body["tool_choice"] = {"type": draw.choice(["none", "auto", "any"])}
    elif draw.random() < 0.2:
        body["output_config"] = {"format": {"type": "json_schema", "schema": forms.schema(draw)}}
    if draw.random() < 0.2:
        body["thinking"] = {"type": draw.choice(["adaptive", "disabled"])}
    if route.endswith("/count_tokens"):
        return body
    return {
        **body,
        "max_tokens": draw.randint(1, 4),
        "stream": draw.random() < 0.4,
        "stop_sequences": ["x"],
    }


def of_responses(draw: random.Random, route: str) -> dict[str, Any]:
    """For Responses."""
    text = {"type": "input_text", "text": "What is this?"}
    picture = base64.b64encode(picture_file(draw)).decode()
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{picture}"}
    of_url = {"type": "input_image", "image_url": values.url(draw)}
    of_file = draw.choice(
        [
            {"type": "input_image", "file_id": file_id(draw)},
            {"type": "input_file", "filename": "a", "file_data": image["image_url"]},
            {"type": "input_file", "file_url": values.url(draw)},
        ]
    )
    items: list[dict[str, Any]] = [
        {
            "role": "user",
            "content": draw.choice(["Hi", [text], [text, image, of_url], [text, of_file]]),
        }
    ]
    if draw.random() < 0.4:
        items += [
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "hm"}],
            },
            {
                "type": "function_call",
                "call_id": "c",
                "name": "weather",
                "arguments": draw.choice(["{}", forms.json_text(draw)]),
            },
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": draw.choice(["sunny", [image]]),
            },
        ]
    if draw.random() < 0.1:
        items.append({"type": "item_reference", "id": f"msg_r_{'0' * 8}_{'0' * 32}_0"})
    body: dict[str, Any] = {
        "model": MODEL,
        "input": draw.choice(["What is this?", items, items]),
        "max_output_tokens": draw.randint(1, 4),
        "stream": draw.random() < 0.4,
        "store": draw.random() < 0.8,
    }
    if draw.random() < 0.3:
        custom = {"name": "run", "format": forms.input_format(draw, is_nested=False)}
        body["tools"] = [
            {"type": "function", "name": "weather", "parameters": forms.schema(draw)},
            {"type": "custom", **custom},
        ]
        body["tool_choice"] = draw.choice(["none", "auto", "required"])
    elif draw.random() < 0.2:
        body["text"] = {
            "format": {"type": "json_schema", "name": "x", "schema": forms.schema(draw)}
        }
    if draw.random() < 0.1:
        body["previous_response_id"] = f"resp_r_{'0' * 8}_{'0' * 32}"
    if draw.random() < 0.1:
        body |= {"background": True, "store": True}
    return body
