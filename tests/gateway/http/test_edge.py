"""What a peer may do over REST before its key has been checked, and what pages of other sites may do."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.gateway.stage import ANSWER, Stage, open_stage

CHAT = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "hello"}]
HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
)


@contextlib.asynccontextmanager
async def connected(
    stage: Stage,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    port = int(stage.gateway.url.rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def send(writer: asyncio.StreamWriter, pieces: list[bytes]) -> None:
    """As much as the other end takes."""
    with contextlib.suppress(OSError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()


def status_and_code(reply: bytes) -> tuple[int, str]:
    head, _, body = reply.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


@pytest.mark.parametrize(
    "pieces",
    [
        [b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Large: " + b"x" * (1 << 20)] * 1,
        [b"GET / HTTP/1.1\r\n", *[b"A: b\r\n" * 500] * 20],
        [b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\n\r\n"],
        [HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", *[b"A: b\r\n" * 500] * 20],
    ],
    ids=["one large header", "many headers", "a long address", "behind a body in pieces"],
)
async def test_headers_have_limits(stage: Stage, pieces: list[bytes]) -> None:
    async with connected(stage) as (reader, writer), asyncio.timeout(60):
        sending = asyncio.create_task(send(writer, pieces))
        assert status_and_code(await reader.read()) == (431, "headers_too_large")
        await sending
    assert (await stage.chat()).status_code == 200


@pytest.mark.full
async def test_a_silent_connection_is_closed_and_a_slow_one_gets_an_error(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer
) -> None:
    changes = {"request_header_timeout": 2.0, "request_body_timeout": 2.0}
    async with (
        open_stage(redis_url, model_folder, tokenizer, **changes) as stage,
        asyncio.timeout(60),
        contextlib.AsyncExitStack() as stack,
    ):
        silent = [await stack.enter_async_context(connected(stage)) for _ in range(350)]
        async with connected(stage) as (reader, writer):
            writer.write(b"GET / HTTP/1.1\r\nHost:")
            assert status_and_code(await reader.read()) == (408, "headers_timeout")
        async with connected(stage) as (reader, writer):
            writer.write(HEAD + b"Content-Length: 100\r\n\r\n{")
            assert status_and_code(await reader.read()) == (408, "body_timeout")
        async with connected(stage) as (reader, writer):
            writer.write(
                b"POST /v1/nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"
            )
            assert status_and_code(await reader.read()) == (404, "no_such_route")
        for reader, _ in silent:
            assert await reader.read() == b""
        assert (await stage.chat()).status_code == 200


async def test_connections_are_counted(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer
) -> None:
    async with (
        open_stage(redis_url, model_folder, tokenizer, max_connections=5) as stage,
        asyncio.timeout(60),
        contextlib.AsyncExitStack() as stack,
    ):
        for _ in range(4):  # and one is the stage's own
            await stack.enter_async_context(connected(stage))
        await asyncio.sleep(0.1)
        async with connected(stage) as (reader, _):
            reply = await reader.read()
            assert status_and_code(reply) == (503, "too_many_connections")
            assert b"retry-after" in reply
        assert (await stage.chat()).status_code == 200


@pytest.mark.full
async def test_unfinished_bodies_share_a_budget(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer
) -> None:
    limits = {"max_body_bytes": 2 << 20, "max_body_bytes_in_flight": 4 << 20}
    async with (
        open_stage(redis_url, model_folder, tokenizer, **limits) as stage,
        asyncio.timeout(60),
        contextlib.AsyncExitStack() as stack,
    ):
        size = 1_900_000
        opened = [await stack.enter_async_context(connected(stage)) for _ in range(6)]
        for _, writer in opened:
            await send(writer, [HEAD + b"Content-Length: %d\r\n\r\n" % size, b" " * (size - 1)])
        done, _ = await asyncio.wait(
            [asyncio.create_task(reader.read()) for reader, _ in opened], timeout=10
        )
        replies = [task.result() for task in done]
        assert {status_and_code(reply) for reply in replies} == {(503, "too_many_bodies")}
        assert 3 <= len(replies) <= 5
        for _, writer in opened:
            writer.close()
        await asyncio.sleep(0.2)
        assert (await stage.chat()).status_code == 200


async def test_a_body_is_given_back_while_its_answer_streams(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer
) -> None:
    limits = {"max_body_bytes": 2 << 20, "max_body_bytes_in_flight": 4 << 20}
    async with open_stage(redis_url, model_folder, tokenizer, **limits) as stage:
        go = asyncio.Event()

        async def wait(rid: str, index: int) -> None:
            await go.wait()

        stage.scheduler.step = wait
        body = {"messages": MESSAGES, "stream": True, "metadata": {"a": "x" * 1_900_000}}
        waiting = [asyncio.create_task(stage.chat(**body)) for _ in range(2)]
        await stage.admitted(2)
        await asyncio.sleep(0.1)
        waiting += [asyncio.create_task(stage.chat(**body)) for _ in range(2)]
        await stage.admitted(4)
        go.set()
        assert [reply.status_code for reply in await asyncio.gather(*waiting)] == [200] * 4


LISTS: list[tuple[str, dict[str, Any], str, int]] = [
    (CHAT, {"messages": [{"role": "user", "content": "x"}] * 300_000}, "messages", 4096),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 9000}]},
        "messages[0].content[8192]",
        8192,
    ),
    (CHAT, {"messages": MESSAGES, "bad_token_ids": [1] * 70_000}, "bad_token_ids", 65536),
    (CHAT, {"messages": MESSAGES, "allowed_token_ids": [1] * 70_000}, "allowed_token_ids", 65536),
    (CHAT, {"messages": MESSAGES, "stop_token_ids": [1] * 2000}, "stop_token_ids", 1024),
    (CHAT, {"messages": MESSAGES, "stop": ["a"] * 17}, "stop", 16),
    (
        CHAT,
        {"messages": MESSAGES, "logit_bias": {str(i): 0 for i in range(70_000)}},
        "logit_bias",
        65536,
    ),
    (
        CHAT,
        {"messages": MESSAGES, "chat_template_kwargs": {"a": "x" * 70_000}},
        "chat_template_kwargs",
        65536,
    ),
    ("/detokenize", {"tokens": [1] * 70_000}, "tokens", 65536),
]


@pytest.mark.parametrize("case", LISTS, ids=[case[2] for case in LISTS])
async def test_lists_have_limits(stage: Stage, case: tuple[str, Any, str, int]) -> None:
    path, body, field, limit = case
    reply = await stage.http.post(path, json=body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == field
    assert str(limit) in error["message"]


async def test_bodies_of_many_values_disturb_no_stream(stage: Stage) -> None:
    """Other streams go on while bodies of 300,000 messages are read."""
    body = json.dumps({"messages": [{"role": "user", "content": "x"}] * 300_000}).encode()
    running = asyncio.create_task(stage.chat(stream=True))
    for _ in range(3):
        reply = await stage.http.post(
            CHAT, content=body, headers={"content-type": "application/json"}
        )
        assert reply.status_code == 400
        assert "4096" in reply.json()["error"]["message"]
    assert "[DONE]" in (await running).text
    millions = b'{"tokens":[' + b"1," * 5_000_000 + b"1]}"
    reply = await stage.http.post(
        "/detokenize", content=millions, headers={"content-type": "application/json"}
    )
    assert reply.status_code == 400
    assert "1000000 values" in reply.json()["error"]["message"]


@pytest.mark.parametrize("depth", [66, 900, 100_000])
async def test_depth_has_a_limit(stage: Stage, depth: int) -> None:
    deep = b'{"a":' * depth + b"1" + b"}" * depth
    body = b'{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":%s}' % deep
    reply = await stage.http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert "deeper than the limit of 64" in reply.json()["error"]["message"]
    assert not stage.preprocess.seen


async def test_what_only_looks_deep_is_taken(stage: Stage) -> None:
    reply = await stage.chat(messages=[{"role": "user", "content": '[{"\\' * 40}])
    assert reply.status_code == 200


FOREIGN = {"origin": "https://evil.example"}


async def test_a_page_of_another_site_may_not_post_without_asking(stage: Stage) -> None:
    body = json.dumps({"messages": MESSAGES}).encode()
    for kind in ({}, {"content-type": "text/plain"}):
        reply = await stage.http.post(CHAT, content=body, headers={**FOREIGN, **kind})
        assert reply.status_code == 403
        assert reply.json()["error"]["code"] == "origin_not_allowed"
    own = {"origin": stage.gateway.url}
    assert (await stage.http.post(CHAT, content=body, headers=own)).status_code == 200
    assert (await stage.http.post(CHAT, content=body)).status_code == 200
    assert (await stage.http.post(CHAT, json={"messages": MESSAGES}, headers=own)).is_success


async def test_a_page_that_is_allowed_may_post(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer
) -> None:
    changes = {"cors_allow_origins": FOREIGN["origin"]}
    async with open_stage(redis_url, model_folder, tokenizer, **changes) as stage:
        body = json.dumps({"messages": MESSAGES}).encode()
        assert (await stage.http.post(CHAT, content=body, headers=FOREIGN)).status_code == 200


HOSTS = [
    ("localhost", True), ("127.0.0.1:8000", True), ("[::1]:8000", True), ("LOCALHOST:1", True),
    ("a.localhost", True), ("good.example", True), ("good.example:8000", True),
    ("evil.example", False), ("127.0.0.1.evil.example", False), ("evil.example:8000", False),
    ("[::2]", False), ("10.0.0.1", False),
]  # fmt: skip


async def test_names_that_could_be_rebound_are_refused(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer
) -> None:
    changes = {"allowed_hosts": "good.example"}
    async with open_stage(redis_url, model_folder, tokenizer, **changes) as stage:
        for host, allowed in HOSTS:
            reply = await stage.http.get("/v1/models", headers={"host": host})
            assert reply.status_code == (200 if allowed else 403), host
        assert "--allowed-hosts" in reply.json()["error"]["message"]
        probed = await stage.http.get("/health/ready", headers={"host": "10.0.0.1"})
        assert probed.status_code == 200


async def test_with_a_key_any_name_will_do(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer
) -> None:
    async with open_stage(redis_url, model_folder, tokenizer, api_key="secret") as stage:
        headers = {"host": "any.example", "authorization": "Bearer secret"}
        assert (await stage.http.get("/v1/models", headers=headers)).status_code == 200


async def test_what_is_no_http_gets_an_error_in_json(stage: Stage) -> None:
    async with connected(stage) as (reader, writer), asyncio.timeout(60):
        writer.write(b"HELLO\r\n\r\n")
        assert status_and_code(await reader.read()) == (400, "invalid_http")
    assert (await stage.chat()).json()["choices"][0]["message"]["content"] == ANSWER
