"""A client that goes away takes its request with it, at whatever moment."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest

from services.gateway.http.exchange import Exchange
from services.gateway.timings import Timings
from shared.errors import Cancelled
from tests.support.gateway.neighbours import Played
from tests.support.gateway.other_apis import NoteForm, NotesEndpoint
from tests.support.gateway.stage import Stage, answer_slowly, until_empty

BODY = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
STREAM = json.dumps({"messages": [{"role": "user", "content": "hello"}], "stream": True}).encode()


@contextlib.asynccontextmanager
async def posted(stage: Stage, body: bytes) -> AsyncIterator[asyncio.StreamReader]:
    """A raw connection on which a request has been sent; closed at the end."""
    port = int(stage.gateway.url.rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    try:
        yield reader
    finally:
        writer.close()
        await writer.wait_closed()


async def test_while_the_body_is_on_its_way(stage: Stage) -> None:
    port = int(stage.gateway.url.rsplit(":", 1)[1])
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{")
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.close()
    await until_empty(stage)
    assert not stage.preprocess.seen


@pytest.mark.parametrize("body", [BODY, STREAM])
async def test_while_it_is_prepared(stage: Stage, body: bytes) -> None:
    stage.preprocess.gate.clear()
    async with posted(stage, body):
        async with asyncio.timeout(60):
            while not stage.preprocess.seen:
                await asyncio.sleep(0.01)
        assert (await stage.scheduler.queue.depth())[0] == 1
    await until_empty(stage)
    stage.preprocess.gate.set()
    await asyncio.sleep(0.1)
    assert not stage.scheduler.played


@pytest.mark.parametrize("timings", [Timings(silence_s=0.2)])  # it writes then, and finds nobody
@pytest.mark.parametrize("body", [BODY, STREAM])
async def test_while_it_waits(stage: Stage, body: bytes) -> None:
    stage.scheduler.taking = False
    async with posted(stage, body):
        async with asyncio.timeout(60):
            while not len(stage.gateway.follower):
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
    await until_empty(stage)
    stage.scheduler.taking = True
    await asyncio.sleep(0.1)
    assert not stage.scheduler.played


@pytest.mark.parametrize("body", [BODY, STREAM])
async def test_while_it_runs(stage: Stage, body: bytes) -> None:
    answer_slowly(stage)
    async with posted(stage, body) as reader:
        played: Played = await stage.scheduler.taken()
        if body is STREAM:
            await reader.readuntil(b"word")
    async with asyncio.timeout(60):
        await played.ended.wait()
    assert played.cancelled
    await until_empty(stage)


async def test_others_go_on(stage: Stage) -> None:
    answer_slowly(stage)
    staying = asyncio.create_task(stage.chat(max_tokens=40))
    await stage.scheduler.taken()
    async with posted(stage, STREAM) as reader:
        await reader.readuntil(b"word")
    reply = (await staying).json()
    assert reply["usage"]["completion_tokens"] == 40
    assert sorted(played.cancelled for played in stage.scheduler.played.values()) == [False, True]


async def test_left_requests_are_counted_as_aborted(stage: Stage) -> None:
    answer_slowly(stage)
    async with posted(stage, STREAM) as reader:
        await reader.readuntil(b"word")
    await until_empty(stage)
    page = (await stage.http.get("/metrics")).text
    assert (
        'vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny-vl"} 1.0'
        in page
    )


async def test_a_client_that_stops_reading_counts_as_gone() -> None:
    never = asyncio.Event()

    async def receive() -> dict[str, str]:
        await never.wait()
        return {}

    async def send(message: object) -> None:
        if isinstance(message, dict) and message.get("more_body"):
            await never.wait()

    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    exchange = Exchange(
        scope, receive, send, "r_x", NotesEndpoint(()), blocked_s=0.05, check_s=0.02
    )
    with pytest.raises(Cancelled) as caught:
        async with asyncio.timeout(60), exchange.while_connected():
            await exchange.start_stream(NoteForm())
            await exchange.write(b"never read")
    assert caught.value.reason == "CLIENT_GONE"
