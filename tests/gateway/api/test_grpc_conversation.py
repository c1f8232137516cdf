"""What a conversation may ask for over gRPC means what it means over REST: media, their options and names, and a bound
of reasoning.
"""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shared.errors import InvalidRequest
from shared.net.channels import open_channel
from shared.net.rpc.errors import calling
from tessera.gateway.v1.chat_pb2 import (
    ChatEvent,
    ChatMessage,
    ChatRequest,
    ContentPart,
    GenerationOptions,
    VideoFrames,
)
from tessera.gateway.v1.chat_pb2_grpc import ChatServiceStub
from tests.support.gateway.marked_model import MARKED
from tests.support.gateway.stage import Stage

STAGED_MODEL = MARKED
URL = "https://example.org/a.png"
OPTIONS: dict[str, Any] = {
    "mm_processor_kwargs": {"max_pixels": 401408, "size": {"longest_edge": 5}},
    "media_io_kwargs": {"video": {"num_frames": 16}},
    "chat_template_kwargs": {"enable_thinking": False},
}


@pytest.fixture
async def chats(stage: Stage) -> AsyncIterator[ChatServiceStub]:
    async with open_channel(stage.gateway.grpc_address) as channel:
        yield ChatServiceStub(channel)


def asked(*parts: ContentPart, text: str = "hello", **fields: Any) -> ChatRequest:
    content = [ContentPart(text=text), *parts]
    return ChatRequest(messages=[ChatMessage(role="user", content=content)], **fields)


async def answered(chats: Any, request: ChatRequest) -> list[ChatEvent]:
    with calling("gateway"):
        return [event async for event in chats.Chat(request)]


async def test_media_are_named_and_processed_as_over_rest(stage: Stage, chats: Any) -> None:
    parts = [
        ContentPart(image_url=URL),
        ContentPart(image_url=URL, uuid="dog"),
        ContentPart(image_url="", uuid="cat"),
        ContentPart(image=b"", uuid="cat"),
        ContentPart(video_url="", uuid="clip"),
    ]
    kwargs = {f"{name}_json": json.dumps(given) for name, given in OPTIONS.items()}
    await answered(chats, asked(*parts, **kwargs))
    content = [
        {"type": "text", "text": "hello"},
        {"type": "image_url", "image_url": URL},
        {"type": "image_url", "image_url": URL, "uuid": "dog"},
        {"type": "image_url", "image_url": None, "uuid": "cat"},
        {"type": "image_url", "uuid": "cat"},
        {"type": "video_url", "uuid": "clip"},
    ]
    reply = await stage.chat(messages=[{"role": "user", "content": content}], **OPTIONS)
    assert reply.status_code == 200, reply.text
    ours, theirs = stage.preprocess.seen[-2:]
    ours.request_id = theirs.request_id
    assert ours == theirs
    assert json.loads(ours.media_options.mm_processor_kwargs_json) == OPTIONS["mm_processor_kwargs"]
    assert list(ours.conversation.item_names) == ["", "dog", "cat", "cat", "clip"]


async def test_frames_of_a_video_may_have_a_name(stage: Stage, chats: Any) -> None:
    frames = VideoFrames(frames=[b"one", b"two"])
    await answered(chats, asked(ContentPart(video_frames=frames, uuid="clip")))
    conversation = stage.preprocess.seen[-1].conversation
    assert list(conversation.item_names) == ["clip"]
    assert [frame.data for frame in conversation.messages[0].content[1].video.frames] == [
        b"one",
        b"two",
    ]


async def test_a_bound_of_reasoning_is_that_of_rest(stage: Stage, chats: Any) -> None:
    for budget in (0, 7):
        await answered(chats, asked(thinking_token_budget=budget))
        assert (await stage.chat(thinking_token_budget=budget)).status_code == 200
    grammars = [played.spec.sampling.grammar for played in stage.scheduler.played.values()]
    assert grammars[0] == grammars[1] != grammars[2] == grammars[3] and all(grammars)


REFUSED = [
    (asked(ContentPart(image_url=URL, uuid="")), "messages[0].content[1].uuid"),
    (asked(ContentPart(image_url=URL, uuid="x" * 257)), "messages[0].content[1].uuid"),
    (asked(ContentPart(text="a", uuid="x")), "messages[0].content[1].uuid"),
    (asked(ContentPart(image_url="")), "messages[0].content[1].image_url"),
    (asked(ContentPart(uuid="x")), "messages[0].content[1].type"),
    (asked(mm_processor_kwargs_json="[]"), "mm_processor_kwargs"),
    (asked(mm_processor_kwargs_json='{"a": NaN}'), "mm_processor_kwargs"),
    (asked(media_io_kwargs_json="{"), "media_io_kwargs"),
    (asked(media_io_kwargs_json='{"a": "' + "x" * 16384 + '"}'), "media_io_kwargs"),
    (asked(chat_template_kwargs_json='{"a": ' + "[" * 60_000), "chat_template_kwargs"),
    (asked(chat_template_kwargs_json="7"), "chat_template_kwargs"),
    (asked(thinking_token_budget=-1), "thinking_token_budget"),
    (asked(thinking_token_budget=513), "thinking_token_budget"),
    (
        asked(thinking_token_budget=5, options=GenerationOptions(ignore_eos=True)),
        "ignore_eos",
    ),
]


async def test_refusals_name_the_field(chats: Any) -> None:
    for request, field in REFUSED:
        with pytest.raises(InvalidRequest) as caught:
            await answered(chats, request)
        assert caught.value.metadata["field"] == field
