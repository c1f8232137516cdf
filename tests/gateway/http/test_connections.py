"""Whatever a client does with its connection, each whole request is answered, and each answer can be read."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.support.gateway.stage import ANSWER, Stage, open_stage

LIVE = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
ASK = {"messages": [{"role": "user", "content": "hello"}]}


def chat(version: str = "1.1", **body: object) -> bytes:
    """A whole request for an answer."""
    content = json.dumps({**ASK, **body}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/{version}\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


@contextlib.asynccontextmanager
async def connected(
    stage: Stage,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    port = int(stage.gateway.url.rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(60):
            yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def response(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body of the next response that has a length."""
    status = int((await reader.readline()).split()[1])
    headers = {}
    while (field := await reader.readline()).strip():
        name, _, value = field.partition(b":")
        headers[name.lower()] = value.strip()
    if status == 100:
        return status, b""
    assert b"transfer-encoding" not in headers
    return status, await reader.readexactly(int(headers[b"content-length"]))


async def answers(reader: asyncio.StreamReader) -> list[tuple[int, bytes]]:
    """Status and body of each response until the connection ends; interim ones are left out."""
    found = []
    with contextlib.suppress(IndexError):  # of the empty line at the end
        while True:
            found.append(await response(reader))
    return [one for one in found if one[0] != 100]


def code(body: bytes) -> str:
    return str(json.loads(body)["error"]["code"])


def text(body: bytes) -> str:
    return str(json.loads(body)["choices"][0]["message"]["content"])


@pytest.mark.parametrize("before", [1, 3])
@pytest.mark.parametrize(
    ("malformed", "status", "reason"),
    [
        (b"NONSENSE\r\n\r\n", 400, "invalid_http"),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 300, 431, "headers_too_large"),
        (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Transfer-Encoding: chunked\r\n\r\nnonsense\r\n",
            400,
            "invalid_http",
        ),
    ],
    ids=["no request", "a long head", "a body that breaks"],
)
async def test_requests_before_a_malformed_one_are_answered(
    before: int, malformed: bytes, status: int, reason: str, stage: Stage
) -> None:
    async with connected(stage) as (reader, writer):
        writer.write(chat() * before + malformed)
        *good, (last, body) = await answers(reader)
    assert [found for found, _ in good] == [200] * before
    assert {text(body) for _, body in good} == {ANSWER}
    assert (last, code(body)) == (status, reason)


async def test_many_requests_at_once_are_answered_or_told(stage: Stage) -> None:
    async with connected(stage) as (reader, writer):
        writer.write(LIVE * 20)
        *good, (last, body) = await answers(reader)
    assert [found for found, _ in good] == [200] * 17  # one, and 16 ahead of its answer
    assert (last, code(body)) == (400, "too_many_requests_at_once")


async def test_a_half_closed_connection_is_answered(stage: Stage) -> None:
    for count in (1, 3):
        async with connected(stage) as (reader, writer):
            writer.write(chat() * count)
            writer.write_eof()
            found = await answers(reader)
        assert [(status, text(body)) for status, body in found] == [(200, ANSWER)] * count
    async with connected(stage) as (reader, writer):
        writer.write(chat(stream=True))
        writer.write_eof()
        assert b"data: [DONE]" in await reader.read()
    async with connected(stage) as (reader, writer):
        writer.write(chat()[:-5])
        writer.write_eof()
        assert [(status, code(body)) for status, body in await answers(reader)] == [
            (400, "invalid_http")
        ]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_is_noticed(stage: Stage, stream: bool) -> None:
    """It looks like one that has only finished sending."""

    async def step(rid: str, index: int) -> None:
        await asyncio.sleep(0.3)

    stage.scheduler.step = step
    async with connected(stage) as (_, writer):
        writer.write(chat(stream=stream, max_tokens=400))
        await stage.admitted(1)
    async with asyncio.timeout(60):
        while not any(played.cancelled for played in stage.scheduler.played.values()):
            await asyncio.sleep(0.05)


async def test_http_1_0_gets_no_chunks(stage: Stage) -> None:
    async with connected(stage) as (reader, writer):
        writer.write(chat("1.0", stream=True))
        reply = await reader.read()
    head, _, body = reply.partition(b"\r\n\r\n")
    assert b"200 OK" in head
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    events = body.split(b"\n\n")
    assert all(event.startswith(b"data: ") for event in events[:-1])
    assert events[-2:] == [b"data: [DONE]", b""]
    async with connected(stage) as (reader, writer):
        writer.write(chat("1.0"))
        ((status, body),) = await answers(reader)
        assert (status, text(body)) == (200, ANSWER)


@pytest.mark.parametrize("declared", [True, False])
async def test_an_error_can_be_read_by_who_is_still_sending(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer, declared: bool
) -> None:
    """As a client does that reads when it has sent all: to close before would reset its connection."""
    size, limit = 24 << 20, 1 << 20
    async with open_stage(redis_url, model_folder, tokenizer, max_body_bytes=limit) as stage:
        port = int(stage.gateway.url.rsplit(":", 1)[1])
        form = f"Content-Length: {size}" if declared else "Transfer-Encoding: chunked"
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n{form}\r\n\r\n"

        def send_and_read() -> bytes:
            with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
                connection.sendall(head.encode())
                piece = b" " * (1 << 20)
                chunk = piece if declared else b"%x\r\n%s\r\n" % (len(piece), piece)
                for _ in range(size // len(piece)):
                    connection.sendall(chunk)
                return b"".join(iter(lambda: connection.recv(1 << 16), b""))

        reply = await asyncio.to_thread(send_and_read)
    assert reply.startswith(b"HTTP/1.1 413")
    assert code(reply.partition(b"\r\n\r\n")[2]) == "body_too_large"


@pytest.mark.parametrize("address", ["http://localhost", "\xff"])
async def test_an_answer_goes_on_before_a_request_with_an_unreadable_address(
    stage: Stage, address: str
) -> None:
    async def step(rid: str, index: int) -> None:
        await asyncio.sleep(0.05)

    stage.scheduler.step = step
    async with connected(stage) as (reader, writer):
        writer.write(chat(stream=True))
        assert b"200 OK" in await reader.readline()
        writer.write(f"GET {address} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode("latin-1"))
        reply = await reader.read()
    _, _, last = reply.partition(b"data: [DONE]")
    assert last.startswith(b"\n\n\r\n0\r\n\r\nHTTP/1.1 400"), reply


async def test_half_a_request_behind_a_whole_one_is_told(stage: Stage) -> None:
    async with connected(stage) as (reader, writer):
        writer.write(chat() + chat()[:-5])
        writer.write_eof()
        (first, body), (second, refusal) = await answers(reader)
    assert (first, text(body)) == (200, ANSWER)
    assert (second, code(refusal)) == (400, "invalid_http")


async def test_what_waits_for_answers_before_it_is_not_late(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer
) -> None:
    """Behind a request that waits for the answer to another one, the gateway reads no more."""

    async def step(rid: str, index: int) -> None:
        await asyncio.sleep(0.2)

    async with open_stage(redis_url, model_folder, tokenizer, request_header_timeout=1.0) as stage:
        stage.scheduler.step = step
        async with connected(stage) as (reader, writer):
            writer.write(chat())
            await stage.admitted(1)
            writer.write(LIVE + LIVE[:20])
            await asyncio.sleep(0.2)
            writer.write(LIVE[20:])
            assert [(await response(reader))[0] for _ in range(3)] == [200] * 3


@pytest.mark.parametrize("late", [b"\r\n", b"{}"])
async def test_an_idle_connection_ends_whatever_came_last(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer, late: bytes
) -> None:
    """The rest of a body that was answered before it came, or a line break behind one."""
    changes = {"request_header_timeout": 30.0, "keep_alive_timeout": 2, "api_key": "k"}
    length = 2 * (late == b"{}")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n"
    async with (
        open_stage(redis_url, model_folder, tokenizer, **changes) as stage,
        connected(stage) as (reader, writer),
    ):
        writer.write(head.encode())
        assert (await response(reader))[0] == 401
        writer.write(late)
        assert await reader.read() == b""


async def test_a_request_that_offers_another_protocol_is_answered_in_this_one(stage: Stage) -> None:
    """As Java's client does, to every server without TLS."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
    head, _, body = chat().partition(b"\r\n\r\n")
    async with connected(stage) as (reader, writer):
        for _ in range(2):
            writer.write(head + b"\r\n" + offer + b"\r\n" + body)
            status, reply = await response(reader)
            assert (status, text(reply)) == (200, ANSWER)


async def test_who_asks_before_sending_a_body_is_told_to_send_it_or_why_not(stage: Stage) -> None:
    head, _, body = chat().partition(b"\r\n\r\n")
    async with connected(stage) as (reader, writer):
        writer.write(head + b"\r\nExpect: 100-continue\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        status, reply = await response(reader)
        assert (status, text(reply)) == (200, ANSWER)
        writer.write(
            b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n"
        )
        assert (await response(reader))[0] == 404


@pytest.mark.parametrize(
    ("version", "hosts", "is_answered"),
    [
        ("1.1", ["localhost"], True),
        ("1.1", ["127.0.0.1:8000"], True),
        ("1.1", ["[::1]:8000"], True),
        ("1.1", [""], True),
        ("1.0", [], True),
        ("1.1", [], False),
        ("1.1", ["localhost", "localhost"], False),
        ("1.0", ["localhost", "other"], False),
        ("1.1", ["local host"], False),
        ("1.1", ["localhost/v1"], False),
    ],
)
async def test_a_request_names_one_host(
    stage: Stage, version: str, hosts: list[str], is_answered: bool
) -> None:
    fields = "".join(f"Host: {host}\r\n" for host in hosts)
    async with connected(stage) as (reader, writer):
        writer.write(f"GET /health/live HTTP/{version}\r\n{fields}\r\n".encode())
        status, body = await response(reader)
    if is_answered:
        assert status == 200
    else:
        assert (status, code(body)) == (400, "invalid_http")
