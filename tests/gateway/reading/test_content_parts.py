"""Parts of a message: what they are, and those over the limits are refused by their place in the request."""

import base64
from typing import Any

import pytest

from services.gateway.decoding.list_limits import MOST_PARTS
from shared.net.channels import open_channel
from tessera.gateway.v1.chat_pb2 import ChatMessage, ChatRequest, ContentPart
from tessera.gateway.v1.chat_pb2_grpc import ChatServiceStub
from tests.support.gateway.stage import Stage
from tests.support.pictures import png

TEXT = {"type": "text", "text": "x"}


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.mark.parametrize(
    ("contents", "param", "words"),
    [
        ([[TEXT] * (MOST_PARTS + 1)], f"messages[0].content[{MOST_PARTS}]", f"{MOST_PARTS} parts"),
        ([[TEXT] * 5000, "text", [TEXT] * 5000], "messages[2].content[3192]", "too many"),
        (
            [[TEXT, image("https://example.org/" + "a" * 8192)]],
            "messages[0].content[1].image_url",
            "longer than 8192 characters",
        ),
        (
            [[TEXT], [TEXT, TEXT, image("https://" + "a" * 300 + ".org/")]],
            "messages[1].content[2].image_url",
            "host",
        ),
        ([[TEXT, {"type": "x" * 5000}]], "messages[0].content[1].type", "must be one of text"),
    ],
    ids=["one message", "all messages", "url", "host", "type"],
)
async def test_parts_over_the_limits_are_named(
    stage: Stage, contents: list[Any], param: str, words: str
) -> None:
    messages = [{"role": "user", "content": content} for content in contents]
    for path in ("/v1/chat/completions", "/tokenize"):
        reply = await stage.http.post(path, json={"messages": messages})
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert error["param"] == param
        assert param in error["message"] and words in error["message"]
        assert len(error["message"]) < 500
    assert not stage.preprocess.seen


async def test_as_many_parts_as_there_may_be_are_taken(stage: Stage) -> None:
    messages = [{"role": "user", "content": [TEXT] * (MOST_PARTS // 2)}] * 2
    reply = await stage.http.post("/tokenize", json={"messages": messages})
    assert reply.status_code == 200
    (seen,) = stage.preprocess.seen
    assert [len(message.content) for message in seen.conversation.messages] == [MOST_PARTS // 2] * 2


async def test_whether_a_content_was_one_text_reaches_preprocess(
    stage: Stage,
) -> None:
    contents: list[Any] = ["one", [TEXT], [TEXT, TEXT]]
    messages = [{"role": "user", "content": content} for content in contents]
    assert (await stage.chat(messages=messages)).status_code == 200
    told = [message.is_string for message in stage.preprocess.seen[-1].conversation.messages]
    assert told == [True, False, False]
    turns = [ChatMessage(role="user", content=[ContentPart(text="x")] * count) for count in (1, 2)]
    async with open_channel(stage.gateway.grpc_address) as channel:
        async for _ in ChatServiceStub(channel).Chat(ChatRequest(messages=turns)):
            pass
    told = [message.is_string for message in stage.preprocess.seen[-1].conversation.messages]
    assert told == [True, False]


PNG = "data:image/png;base64," + base64.b64encode(png(1, (28, 28))).decode()


async def test_a_part_without_a_type_is_known_by_its_one_key(stage: Stage) -> None:
    contents: list[Any] = [
        [{"text": "What is this?"}, {"image_url": {"url": PNG}}],
        [{"type": None, "text": "What is this?", "image_url": None}, {"image_url": PNG}],
        [{"text": "Look"}, {"video_url": {"url": "https://example.org/a.mp4"}, "image": None}],
    ]
    kinds = []
    for content in contents:
        for path in ("/v1/chat/completions", "/tokenize"):
            messages = [{"role": "user", "content": content}]
            reply = await stage.http.post(path, json={"messages": messages})
            assert reply.status_code == 200
            (turn,) = stage.preprocess.seen[-1].conversation.messages
            kinds.append([part.WhichOneof("part") for part in turn.content])
    assert kinds == [["text", "media"]] * 4 + [["text", "video"]] * 2


async def test_images_and_videos_may_be_named_by_the_keys_of_mindie(stage: Stage) -> None:
    content: list[Any] = [
        {"image": "/pictures/a b.png"},
        {"image": PNG},
        {"type": "image", "image": "file:///c.png"},
        {"video": "https://example.org/a.mp4"},
        {"text": "What is this?"},
    ]
    reply = await stage.chat(messages=[{"role": "user", "content": content}])
    assert reply.status_code == 200
    (turn,) = stage.preprocess.seen[-1].conversation.messages
    named, sent, file, video, _ = turn.content
    assert (named.media.url, file.media.url) == ("file:///pictures/a%20b.png", "file:///c.png")
    assert sent.media.data == png(1, (28, 28))
    assert video.video.file.url == "https://example.org/a.mp4"


UNCLEAR: list[tuple[Any, str, tuple[str, ...]]] = [
    ({}, "", ("text, image_url, video_url", "none of them")),
    ({"url": "https://example.org/"}, "", ("text, image_url, video_url", "none of them")),
    ({"text": "x", "image_url": PNG}, "", ("text and image_url",)),
    ({"text": "x", "video": "a.mp4"}, "", ("text and video",)),
    ({"image": "a.png"}, ".image", ("data:", "file: URL")),
    ({"image": ["/a.png"]}, ".image", ("must be a string",)),
    ({"video": "ftp://example.org/a.mp4"}, ".video", ("data:", "file: URL")),
    ({"audio": {"data": ""}}, ".audio", ("is not taken", "no sound")),
    ({"type": "input_image", "image": "/a.png"}, ".type", ("'input_image'", "image_url")),
    ({"type": "input_audio", "input_audio": {}}, ".type", ("'input_audio'", "no sound")),
    ({"type": "input_text", "text": "x"}, ".type", ("'input_text'", '"type": "text"')),
    ({"type": "file", "file": {}}, ".file.file_id", ("is missing",)),
]


@pytest.mark.parametrize(("part", "place", "words"), UNCLEAR, ids=lambda value: str(value)[:50])
async def test_a_part_that_is_none_or_two_is_named_with_its_keys(
    stage: Stage, part: Any, place: str, words: tuple[str, ...]
) -> None:
    reply = await stage.chat(messages=[{"role": "user", "content": [TEXT, part]}])
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, f"messages[0].content[1]{place}")
    assert all(word in error["message"] for word in (error["param"], *words))
    assert not stage.preprocess.seen
