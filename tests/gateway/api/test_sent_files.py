"""Pictures that requests name by the id of a file of /v1/files, or send as a file: in chats, responses, messages and
batches, at any gateway, and by nobody but who sent them.
"""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from openai.types import FileObject
from tokenizers import Tokenizer

from services.gateway.apis import APIS
from services.gateway.gateway import open_gateway
from shared.errors import InvalidRequest
from shared.net.channels import open_channel
from shared.net.rpc.errors import calling
from tessera.gateway.v1.chat_pb2 import ChatEvent, ChatMessage, ChatRequest, ContentPart
from tessera.gateway.v1.chat_pb2_grpc import ChatServiceStub
from tessera.gateway.v1.vectors_pb2 import PoolRequest
from tessera.gateway.v1.vectors_pb2_grpc import VectorServiceStub
from tests.support.gateway.stage import ANSWER, MODEL, Stage, open_stage
from tests.support.network.http import plain_client
from tests.support.pictures import data_url, png

OURS = {"authorization": "Bearer none"}  # the tenant of the client
# Larger than what is left in a body's JSON, and in several pieces.
PICTURE = png(3) + bytes(2 << 20)
MOST = 4 << 20


@pytest.fixture
async def stage(redis_url: str, model_folder: Path, tokenizer: Tokenizer) -> AsyncIterator[Stage]:
    async with open_stage(redis_url, model_folder, tokenizer, APIS, max_body_bytes=MOST) as opened:
        yield opened


async def sent(stage: Stage, content: bytes = PICTURE, purpose: Any = "vision") -> FileObject:
    return await stage.openai.files.create(file=("a.png", content), purpose=purpose)


def by_route(file_id: str) -> Mapping[str, Any]:
    """Bodies that show a file, by path."""
    chat = {"type": "file", "file": {"file_id": file_id}}
    source = {"type": "file", "file_id": file_id}
    turns = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    found: dict[str, Any] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": [chat]}]},
        "/tokenize": {"messages": [{"role": "user", "content": [chat]}]},
        "/v1/messages": {"messages": turns, "max_tokens": 50},
        "/v1/messages/count_tokens": {"messages": turns},
    }
    for kind, path in (
        ("input_image", "/v1/responses"),
        ("input_file", "/v1/responses/input_tokens"),
    ):
        part = {"type": kind, "file_id": file_id}
        found[path] = {"input": [{"role": "user", "content": [part]}]}
    return found


def shown(stage: Stage) -> list[bytes]:
    """The pictures of the prompt that was prepared last."""
    messages = stage.preprocess.seen[-1].conversation.messages
    return [part.media.data for m in messages for part in m.content if part.HasField("media")]


@pytest.mark.parametrize("purpose", ["vision", "user_data"])
async def test_every_api_shows_a_file_that_was_sent(stage: Stage, purpose: str) -> None:
    file = await sent(stage, purpose=purpose)
    assert file.purpose == purpose
    assert [one.id for one in (await stage.openai.files.list(purpose=purpose)).data] == [file.id]
    for path, body in by_route(file.id).items():
        reply = await stage.http.post(path, json={"model": MODEL, **body}, headers=OURS)
        assert reply.status_code == 200, reply.text
        assert shown(stage) == [PICTURE], path
    # Whoever `user` says that the request is of.
    body = by_route(file.id)["/v1/chat/completions"] | {"user": "alice"}
    assert (await stage.http.post("/v1/chat/completions", json=body, headers=OURS)).is_success


async def test_a_file_that_is_none_of_theirs_is_not_shown(stage: Stage) -> None:
    file, other = await sent(stage), await sent(stage, b"{}\n", "batch")
    for path, body in by_route(file.id).items():
        reply = await stage.http.post(path, json=body, headers={"authorization": "Bearer other"})
        assert reply.status_code == 400 and "there is no file" in reply.text, path
    for file_id, said in (
        (other.id, "purpose batch"),
        ("file-" + "0" * 32, "there is no file"),
        ("x", "there is no file"),
        ("", "is missing"),
        ("x" * 300, "longer than 256"),
    ):
        body = by_route(file_id)["/v1/chat/completions"]
        reply = await stage.http.post("/v1/chat/completions", json=body, headers=OURS)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (
            400,
            "messages[0].content[0].file.file_id",
        )
        assert said in error["message"]
    # By an id alone, not by an address.
    url = {"type": "image_url", "image_url": {"url": f"sent-file:{file.id}"}}
    reply = await stage.chat(messages=[{"role": "user", "content": [url]}])
    assert reply.status_code == 400 and "must be a data:" in reply.text
    await stage.openai.files.delete(file.id)
    reply = await stage.http.post(
        "/v1/responses", json=by_route(file.id)["/v1/responses"], headers=OURS
    )
    assert (reply.status_code, reply.json()["error"]["param"]) == (
        400,
        "input[0].content[0].file_id",
    )


def turn(*parts: ContentPart) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=[ContentPart(text="hello"), *parts])]


async def over_grpc(address: str, key: str, *parts: ContentPart) -> list[ChatEvent]:
    async with open_channel(address) as channel:
        call = ChatServiceStub(channel).Chat(
            ChatRequest(messages=turn(*parts)), metadata=[("authorization", f"Bearer {key}")]
        )
        with calling("gateway"):
            return [event async for event in call]


async def test_grpc_shows_a_file_that_was_sent_at_any_gateway(stage: Stage) -> None:
    file = await sent(stage)
    part = ContentPart(file_id=file.id, uuid="dog")
    async with open_gateway(stage.settings) as other:
        for address in (stage.gateway.grpc_address, other.grpc_address):
            events = await over_grpc(address, "none", part)
            assert "".join(event.delta.text for event in events) == ANSWER
            assert shown(stage) == [PICTURE]
            assert list(stage.preprocess.seen[-1].conversation.item_names) == ["dog"]
    batch = await sent(stage, b"{}\n", "batch")
    for key, file_id, says in (
        ("another", file.id, "there is no file"),
        ("none", batch.id, "purpose batch"),
        ("none", "", "is missing"),
        ("none", "x" * 300, "longer than 256"),
    ):
        with pytest.raises(InvalidRequest, match=says) as refused:
            await over_grpc(stage.gateway.grpc_address, key, ContentPart(file_id=file_id))
        assert refused.value.metadata["field"] == "messages[0].content[1].file.file_id"
    # By an id alone, not by an address.
    with pytest.raises(InvalidRequest, match="must be a data:"):
        by_url = ContentPart(image_url=f"sent-file:{file.id}")
        await over_grpc(stage.gateway.grpc_address, "none", by_url)


async def test_vectors_over_grpc_show_a_file_that_was_sent(embeds: Stage) -> None:
    file = await sent(embeds)
    request = PoolRequest(messages=turn(ContentPart(file_id=file.id)))
    async with open_channel(embeds.gateway.grpc_address) as channel:
        call = VectorServiceStub(channel).Pool(request, metadata=[("authorization", "Bearer none")])
        vector, usage = [event async for event in call]
    assert vector.vector.values and usage.usage.prompt_tokens
    assert shown(embeds) == [PICTURE]


async def test_files_of_one_request_are_no_larger_than_a_body(stage: Stage) -> None:
    names = [(await sent(stage)).id for _ in range(2)]
    parts: Any = [{"type": "file", "file": {"file_id": name}} for name in names]
    body = {"messages": [{"role": "user", "content": [*parts, parts[0]]}]}
    reply = await stage.http.post("/v1/chat/completions", json=body, headers=OURS)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "messages[0].content[1].file.file_id")
    assert f"{MOST} bytes" in error["message"]
    # What a request holds of the budget is given back.
    load = (await stage.http.get("/v1/system")).json()["services"][0]["replicas"][0]["load"]
    assert load["body_bytes"] == 0


async def test_another_gateway_goes_on_with_a_picture(stage: Stage) -> None:
    """A kept response names the file, and the gateway that took it is gone."""
    file = await sent(stage)
    body = by_route(file.id)["/v1/responses"]
    first = (await stage.http.post("/v1/responses", json=body, headers=OURS)).json()
    await stage.gateway.http_server.stop()
    settings = stage.settings.model_copy(update={"port": 0, "grpc_port": 0})
    async with open_gateway(settings) as other, plain_client(other.url, timeout=60) as http:
        async with asyncio.timeout(60):
            while (await http.get("/health/ready")).status_code != 200:
                await asyncio.sleep(0.01)
        more = {"input": "And now?", "previous_response_id": first["id"]}
        second = await http.post("/v1/responses", json=more, headers=OURS)
        assert second.json()["output"][0]["content"][0]["text"] == ANSWER
        assert shown(stage) == [PICTURE]


async def test_a_line_of_a_batch_shows_a_file(stage: Stage) -> None:
    file = await sent(stage)
    path = "/v1/chat/completions"
    line = {"custom_id": "a", "method": "POST", "url": path, "body": by_route(file.id)[path]}
    lines = await stage.openai.files.create(file=json.dumps(line).encode(), purpose="batch")
    batch = await stage.openai.batches.create(
        input_file_id=lines.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    async with asyncio.timeout(60):
        while batch.status != "completed":
            await asyncio.sleep(0.02)
            batch = await stage.openai.batches.retrieve(batch.id)
    assert batch.request_counts is not None and batch.request_counts.completed == 1
    assert shown(stage) == [PICTURE]


async def test_a_picture_may_be_sent_as_a_file(stage: Stage) -> None:
    url = data_url(PICTURE)
    bodies: Any = {
        "/v1/chat/completions": ("messages", [{"type": "file", "file": {"file_data": url, "filename": "a"}}]),
        "/v1/responses": ("input", [{"type": "input_file", "file_data": url, "filename": "a.png"}]),
    }  # fmt: skip
    for path, (field, parts) in bodies.items():
        body = {field: [{"role": "user", "content": parts}]}
        reply = await stage.http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        assert shown(stage) == [PICTURE]
    document = "data:application/pdf;base64," + base64.b64encode(b"%PDF").decode()
    for part, field in (
        ({"type": "input_file", "file_data": document}, "file_data"),
        ({"type": "input_file", "file_data": "%PDF"}, "file_data"),
        ({"type": "input_file", "filename": "a.png"}, "file_data"),
        ({"type": "input_file", "file_url": "https://a.org/a.png", "file_id": "x"}, "file_id"),
        ({"type": "input_image", "image_url": "https://a.org/a.png", "file_id": "x"}, "file_id"),
        ({"type": "input_image", "file_data": url}, "image_url"),
    ):
        body = {"input": [{"role": "user", "content": [part]}]}
        reply = await stage.http.post("/v1/responses", json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (
            400,
            f"input[0].content[0].{field}",
        )


async def test_clients_of_anthropics_api_send_files(stage: Stage) -> None:
    from tests.gateway.api.test_anthropic import anthropic_client

    async with anthropic_client(stage) as client:
        file = await client.beta.files.upload(file=("a.png", PICTURE, "image/png"))
        assert (file.type, file.mime_type, file.size_bytes) == ("file", "image/png", len(PICTURE))
        assert [one.id async for one in client.beta.files.list()] == [file.id]
        source: Any = {"type": "file", "file_id": file.id}
        await client.beta.messages.create(
            model=MODEL,
            max_tokens=50,
            messages=[{"role": "user", "content": [{"type": "image", "source": source}]}],
        )
        assert shown(stage) == [PICTURE]
        assert (await client.beta.files.delete(file.id)).type == "file_deleted"
