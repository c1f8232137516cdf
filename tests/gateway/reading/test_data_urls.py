"""Media in bodies are taken out before the JSON is read, and decoded once the request has its reservation."""

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from services.gateway.api.openai.requests import media_urls
from services.gateway.api.openai.schema import ChatRequest
from services.gateway.decoding.decode import decode
from services.gateway.reading.media.data_urls import decode_with_media
from tests.support.gateway.stage import Stage, open_stage

CHAT = "/v1/chat/completions"
PICTURE = os.urandom(900_000)
DATA = base64.b64encode(PICTURE).decode()


def image(data: str = DATA, kind: str = "image/png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}


def video(*frames: str) -> dict[str, Any]:
    return {"type": "video_url", "video_url": f"data:video/jpeg;base64,{','.join(frames)}"}


def body(*parts: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], **fields}


async def test_large_pictures_and_frames_arrive_as_they_were(stage: Stage) -> None:
    small = base64.b64encode(b"small").decode()
    parts = (image(), image(small), {"type": "text", "text": "?"}, video(DATA, small), image())
    reply = await stage.http.post(CHAT, json=body(*parts))
    assert reply.status_code == 200
    (prepare,) = stage.preprocess.seen
    found = prepare.conversation.messages[0].content
    assert [found[i].media.data for i in (0, 1, 4)] == [PICTURE, b"small", PICTURE]
    assert [frame.data for frame in found[3].video.frames] == [PICTURE, b"small"]
    assert found[4].media.field == "messages[0].content[4].image_url"


@pytest.mark.parametrize("spoil", ["/", "\n"])
async def test_escapes_and_line_breaks_are_read_too(stage: Stage, spoil: str) -> None:
    text = json.dumps(body(image(DATA[:5000] + ("" if spoil == "/" else spoil) + DATA[5000:])))
    if spoil == "/":
        text = text.replace("/", "\\/")
    headers = {"Content-Type": "application/json"}
    reply = await stage.http.post(CHAT, content=text.encode(), headers=headers)
    assert reply.status_code == 200
    part = stage.preprocess.seen[0].conversation.messages[0].content[0]
    assert part.media.data == PICTURE


def test_what_only_looks_like_media_stays_where_it_is() -> None:
    url = f"data:text/plain;base64,{DATA}"
    for content in (
        body({"type": "text", "text": url}),
        body({"type": "text", "text": json.dumps(body(image()))}),
        body({"type": "text", "text": "x"}, metadata={"url": url}),
        body(image(), metadata={"image_url": url}),
    ):
        written = json.dumps(content).encode()
        found = decode_with_media(written, ChatRequest, media_urls)
        assert (found.json, found.media.pieces) == (written, [])
        assert found.content == decode(written, ChatRequest)


@pytest.mark.parametrize("spoil", [5000, 5001, 400_000, -1])
async def test_large_data_that_is_no_base64_is_refused_by_name(stage: Stage, spoil: int) -> None:
    data = DATA[:spoil] + ("=" if spoil > 0 else "") + DATA[spoil + 1 :] if spoil > 0 else DATA[:-1]
    reply = await stage.http.post(CHAT, json=body({"type": "text", "text": "?"}, image(data)))
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "messages[0].content[1].image_url"
    await stage.gateway.admission.settled()
    assert await stage.scheduler.queue.depth() == (0, 0)


async def test_a_full_queue_refuses_before_media_are_decoded(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer
) -> None:
    limits = {"max_waiting_requests": 1}
    async with open_stage(redis_url, model_folder, tokenizer, **limits) as stage:
        stage.scheduler.taking = False
        async with stage.http.stream("POST", CHAT, json=body(image(), stream=True)):
            reply = await stage.http.post(CHAT, json=body(image(DATA[:-1])))
        assert reply.status_code == 429 and int(reply.headers["retry-after"]) >= 1
