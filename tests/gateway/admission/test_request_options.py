"""What headers and fields say about time, turn and keys; and what happens when the time is over."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from services.gateway.admission.request_options import (
    RequestOptions,
    Timeouts,
    json_fingerprint,
    read_request_options,
)
from services.gateway.api.openai.requests import media_urls
from services.gateway.api.openai.schema import ChatRequest
from services.gateway.decoding.decode import decode
from services.gateway.reading.media.data_urls import decode_with_media
from services.gateway.reading.options import GenerationOptions
from shared.errors import Expired, InvalidRequest
from shared.net.channels import open_channel
from shared.net.rpc.errors import calling
from tessera.gateway.v1 import chat_pb2
from tessera.gateway.v1.chat_pb2_grpc import ChatServiceStub
from tests.support.gateway.stage import Stage, open_stage

NONE = Timeouts()
SERVER = Timeouts(queue_ms=1000, first_token_ms=2000, request_ms=3000)


def options(
    body: dict[str, Any] | None = None, limits: Timeouts = NONE, **headers: str
) -> RequestOptions:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    content = decode(json.dumps(body or {}).encode(), GenerationOptions)
    return read_request_options(lambda name: given.get(name, ""), content, limits)


def test_timeouts_come_from_the_body_the_headers_and_the_server() -> None:
    assert options().timeouts == NONE
    assert options(limits=SERVER).timeouts == SERVER
    assert options({"timeout": 1.5}).timeouts.request_ms == 1500
    asked = options(
        x_tessera_queue_timeout="0.5",
        x_tessera_first_token_timeout="7",
        x_tessera_request_timeout="9",
    )
    assert asked.timeouts == Timeouts(500, 7000, 9000)
    assert options({"timeout": 60}, SERVER).timeouts.request_ms == 3000, "the server's is shorter"
    assert options({"timeout": 0.25}, SERVER).timeouts.waiting_ms == 250


def test_classes_come_from_the_tier_or_the_header() -> None:
    assert options().prio == options({"service_tier": "priority"}).prio == "interactive"
    assert options({"service_tier": "flex"}).prio == "batch"
    assert options(x_tessera_priority="batch").prio == "batch"
    assert options({"service_tier": "flex"}, x_tessera_priority="interactive").prio == "interactive"


@pytest.mark.parametrize(
    ("body", "headers", "field"),
    [
        ({"timeout": 0}, {}, "timeout"),
        ({"timeout": "1"}, {}, "timeout"),
        ({"timeout": 1e9}, {}, "timeout"),
        ({"service_tier": "gold"}, {}, "service_tier"),
        ({}, {"x_tessera_priority": "high"}, "X-Tessera-Priority"),
        ({}, {"x_tessera_queue_timeout": "nan"}, "X-Tessera-Queue-Timeout"),
        ({}, {"x_tessera_first_token_timeout": "-1"}, "X-Tessera-First-Token-Timeout"),
        ({}, {"x_tessera_request_timeout": "later"}, "X-Tessera-Request-Timeout"),
    ],
)
def test_what_is_wrong_is_named(body: dict[str, Any], headers: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        options(body, **headers)
    assert caught.value.metadata["field"] == field


def test_a_fingerprint_is_about_the_answer() -> None:
    def of(body: bytes, route: str = "chat") -> bytes:
        found = decode_with_media(body, ChatRequest, media_urls)
        return json_fingerprint(found.json, route, found.media)

    picture = b'{"messages":[{"content":[{"image_url":{"url":"data:image/png;base64,%s"}}]}]%s}'
    large = picture % (b"A" * 9000, b"")
    assert of(large) == of(large.replace(b":", b" : ").replace(b"data : ", b"data:"))
    assert of(large) == of(picture % (b"A" * 9000, b',"stream":true,"stream_options":{}'))
    assert of(large) != of(picture % (b"A" * 8999 + b"B", b""))
    assert of(large) != of(picture % (b"A" * 9000, b',"seed":1'))
    assert of(large) != of(large, "completions")
    assert of(b'{"a":1,"b":2}') == of(b'{"b":2,"a":1}') != of(b'{"a":2,"b":1}')


async def test_options_reach_the_queue(stage: Stage) -> None:
    headers = {"X-Tessera-Queue-Timeout": "5", "X-Tessera-First-Token-Timeout": "6"}
    stage.http.headers.update(headers)
    await stage.chat(timeout=7, service_tier="flex")
    (played,) = stage.scheduler.played.values()
    spec = played.spec
    assert (spec.queue_timeout_ms, spec.first_token_timeout_ms, spec.timeout_ms) == (
        5000,
        6000,
        7000,
    )
    assert stage.scheduler.classes == ["batch"]


async def test_encoder_tokens_are_counted(stage: Stage) -> None:
    part = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    await stage.chat(messages=[{"role": "user", "content": [part, part]}])
    (played,) = stage.scheduler.played.values()
    assert played.spec.media_cost == sum(item.rows for item in played.spec.media) > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_no_scheduler_takes_ends_in_time(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer, stream: bool
) -> None:
    async with open_stage(redis_url, model_folder, tokenizer, queue_timeout=0.2) as stage:
        stage.scheduler.taking = False
        reply = await asyncio.wait_for(stage.chat(stream=stream), 60)
        if stream:
            assert '"code": "queue_timeout"' in reply.text.split("\n\n")[-2]
        else:
            assert (reply.status_code, reply.json()["error"]["code"]) == (504, "queue_timeout")
        assert await stage.scheduler.queue.depth() == (0, 0)


async def test_timeouts_over_grpc(stage: Stage) -> None:
    stage.scheduler.taking = False
    message = chat_pb2.ChatMessage(role="user", content=[chat_pb2.ContentPart(text="hello")])
    request = chat_pb2.ChatRequest(
        messages=[message], options=chat_pb2.GenerationOptions(timeout=0.2)
    )
    async with open_channel(stage.gateway.grpc_address) as channel:
        with pytest.raises(Expired) as caught, calling("gateway"):
            async for _ in ChatServiceStub(channel).Chat(request):
                pass
    assert caught.value.reason == "REQUEST_TIMEOUT"
