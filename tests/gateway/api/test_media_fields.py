"""Options and names of media in a chat, as they are handed on to preprocess."""

import json
from typing import Any

import pytest

from services.gateway.api.openai.requests import read_chat
from services.gateway.api.openai.schema import ChatRequest
from services.gateway.decoding.decode import decode
from shared.errors import InvalidRequest
from tessera.preprocess.v1.preprocess_pb2 import PrepareRequest
from tests.support.gateway.served_model import model


def prepare(messages: Any = "hi", **body: Any) -> PrepareRequest:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    content = decode(json.dumps({"messages": messages, **body}).encode(), ChatRequest)
    return read_chat(content, model()).prepare


def test_options_of_media_are_handed_on_with_media() -> None:
    options = {"mm_processor_kwargs": {"max_pixels": 5}, "media_io_kwargs": {}}
    shown = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages = [{"role": "user", "content": [shown]}]
    asked = prepare(messages, **options).media_options
    assert json.loads(asked.mm_processor_kwargs_json) == {"max_pixels": 5}
    assert not asked.media_io_kwargs_json
    # A text has nothing to which they could apply.
    assert not prepare(**options).HasField("media_options")


def test_media_are_named_in_the_order_of_the_prompt() -> None:
    url = {"url": "data:image/png;base64,AAAA"}
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": url},
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": None, "uuid": "cat"},
        {"type": "video_url", "uuid": "clip"},
        {"type": "image_url", "image_url": url, "uuid": "dog"},
    ]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": parts},
    ]
    conversation = prepare(messages).conversation
    assert list(conversation.item_names) == ["", "cat", "clip", "dog"]
    read = conversation.messages[1].content
    assert read[2].media.WhichOneof("source") is None and read[2].media.field
    assert not read[3].video.HasField("file") and read[4].media.url == url["url"]
    messages[1]["content"] = parts[:1]
    assert not prepare(messages).conversation.item_names
    for part, field in (
        ({"type": "text", "text": "a", "uuid": "x"}, "uuid"),
        ({"type": "image_url", "uuid": ""}, "uuid"),
        ({"type": "image_url", "uuid": "x" * 257}, "uuid"),
        ({"type": "image_url", "image_url": None}, "image_url"),
    ):
        messages[1]["content"] = [part]
        with pytest.raises(InvalidRequest) as caught:
            prepare(messages)
        assert caught.value.metadata["field"] == f"messages[1].content[0].{field}"
