"""The client against gateways that break off, refuse and restart at chosen moments."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import pytest

from shared.client import Client, Event, Failed, GaveUp, Refused
from shared.client.http import Connection
from tests.support.network.ports import closed_port

PATH = "/v1/completions"
DONE = b"data: [DONE]\n\n"


@dataclass
class Asked:
    """One request as a gateway saw it."""

    line: str
    headers: dict[str, str]
    body: dict[str, Any]


Reply = Callable[[Asked], bytes]


@dataclass
class Gateway:
    """Answers each request with the next reply, and closes the connection behind it."""

    replies: list[Reply | bytes]
    asked: list[Asked] = field(default_factory=list)
    url: str = ""
    serving: list[asyncio.Task[Any] | None] = field(default_factory=list)
    met: asyncio.Event = field(default_factory=asyncio.Event)  # somebody has connected

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.serving.append(asyncio.current_task())
        self.met.set()
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:]) if k}
            body = await reader.readexactly(int(headers["content-length"]))
            self.asked.append(Asked(head[0], headers, json.loads(body or b"{}")))
            reply = self.replies.pop(0)
            writer.write(reply if isinstance(reply, bytes) else reply(self.asked[-1]))
            await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@contextlib.asynccontextmanager
async def gateway(*replies: Reply | bytes) -> AsyncIterator[Gateway]:
    played = Gateway(list(replies))
    server = await asyncio.start_server(played.serve, "127.0.0.1", 0)
    played.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield played
        await asyncio.wait_for(asyncio.gather(*filter(None, played.serving)), 60)


def token(count: int) -> bytes:
    """The event of the count-th token."""
    choice = {"index": 0, "text": f"w{count} ", "token_ids": [count]}
    return b"id: r_ab/%d\ndata: %s\n\n" % (count, json.dumps({"choices": [choice]}).encode())


def end(count: int) -> bytes:
    """The last event of the choice."""
    choice = {"index": 0, "text": "", "finish_reason": "length"}
    return b"id: r_ab/%de\ndata: %s\n\n" % (count, json.dumps({"choices": [choice]}).encode())


USAGE = b'id: r_ab/4e\ndata: {"choices":[],"usage":{"completion_tokens":4}}\n\n'


def stream(*events: bytes, whole: bool = True) -> bytes:
    """A 200; one that is not whole breaks off."""
    size = sum(map(len, events)) + (0 if whole else 100)
    head = f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: {size}\r\n\r\n"
    return head.encode() + b"".join(events)


def refusal(status: int, message: str, *headers: str) -> bytes:
    body = json.dumps({"error": {"message": message}})
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", *headers, "", body]
    return "\r\n".join(lines).encode()


async def read(client: Client, **body: Any) -> list[Event]:
    return [event async for event in client.stream(PATH, {"prompt": "a", **body})]


def text(events: list[Event]) -> str:
    return "".join(c["text"] for event in events for c in event.data["choices"])


async def test_a_stream_goes_on_at_another_gateway_after_its_last_whole_event() -> None:
    broken = stream(token(1), token(2), token(3)[:-9], whole=False)
    async with gateway(broken) as first, gateway(
        stream(token(3), token(4), end(4), USAGE, DONE)
    ) as second:  # fmt: skip
        client = Client([first.url, second.url], patience_s=30)
        events = await read(client, user="me")
        client.close()
    assert text(events) == "w1 w2 w3 w4 "
    (asked,) = second.asked
    method, path, _ = asked.line.split()
    assert method == "GET"
    assert unquote(path) == "/v1/requests/r_ab/stream?after=r_ab/2&user=me"
    assert asked.headers["last-event-id"] == "r_ab/2"
    assert client.reconnects == 1


async def test_a_gateway_that_shuts_down_is_left_for_another() -> None:
    ends = b'data: {"error":{"message":"this gateway is shutting down","code":"shutting_down"}}\n\n'
    async with gateway(stream(token(1), token(2), ends)) as first, gateway(
        stream(token(3), end(3), DONE)
    ) as second:  # fmt: skip
        client = Client([first.url, second.url], patience_s=30)
        events = await read(client)
        client.close()
    assert text(events) == "w1 w2 w3 "
    assert second.asked[0].headers["last-event-id"] == "r_ab/2"


async def test_before_the_first_event_the_same_request_is_sent_again_with_its_key() -> None:
    async with gateway(stream(whole=False), stream(token(1), end(1), DONE)) as only:
        client = Client([only.url + "/v1"], api_key="secret", patience_s=30)
        assert text(await read(client)) == "w1 "
        client.close()
    first, again = only.asked
    assert first.line == again.line == f"POST {PATH} HTTP/1.1"
    assert first.body == again.body == {"prompt": "a", "stream": True}
    assert first.headers["idempotency-key"] == again.headers["idempotency-key"]
    assert first.headers["x-tessera-resume"] == "30"
    assert first.headers["authorization"] == "Bearer secret"


async def test_two_streams_have_keys_of_their_own() -> None:
    async with gateway(*[stream(token(1), end(1), DONE)] * 2) as only:
        client = Client([only.url])
        await read(client)
        await read(client)
        client.close()
    assert len({asked.headers["idempotency-key"] for asked in only.asked}) == 2


async def test_usage_that_comes_again_is_given_once() -> None:
    async with gateway(stream(token(4), end(4), USAGE, whole=False), stream(USAGE, DONE)) as only:
        client = Client([only.url])
        events = await read(client)
        client.close()
    assert [bool(event.data.get("usage")) for event in events] == [False, False, True]


async def test_a_gateway_that_is_away_is_passed_over() -> None:
    with closed_port() as port:
        async with gateway(stream(token(1), end(1), DONE)) as there:
            client = Client([f"http://127.0.0.1:{port}", there.url])
            assert text(await read(client)) == "w1 "
            client.close()


async def test_a_full_server_is_asked_again_after_its_retry_delay() -> None:
    full = refusal(429, "queue is full", "Retry-After: 1")
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with gateway(full, stream(token(1), end(1), DONE)) as only:
        client = Client([only.url])
        assert text(await read(client)) == "w1 "
        client.close()
    assert loop.time() - began >= 1.0


async def test_a_wait_that_is_longer_than_its_patience_is_a_refusal_at_once() -> None:
    async with gateway(refusal(429, "queue is full", "Retry-After: 40")) as only:
        client = Client([only.url], patience_s=2)
        with pytest.raises(Refused, match="queue is full") as error:
            await read(client)
        client.close()
    assert error.value.status == 429


async def test_what_is_invalid_is_not_asked_again() -> None:
    async with gateway(refusal(400, "max_tokens must be positive")) as only:
        client = Client([only.url])
        with pytest.raises(Refused, match="max_tokens must be positive"):
            await read(client)
        client.close()
    assert len(only.asked) == 1


async def test_a_request_that_is_gone_for_good_is_a_refusal() -> None:
    gone = [refusal(404, "no such request")] * 20
    async with gateway(stream(token(1), whole=False), *gone) as only:
        client = Client([only.url], unknown_s=0.15)
        with pytest.raises(Refused, match="no such request"):
            await read(client)
        client.close()


async def test_an_error_in_the_stream_ends_it() -> None:
    failed = b'data: {"error":{"message":"another history","code":"stream_diverged"}}\n\n'
    async with gateway(stream(token(1), failed)) as only:
        client = Client([only.url])
        with pytest.raises(Failed, match="another history") as error:
            await read(client)
        client.close()
    assert error.value.code == "stream_diverged"
    assert len(only.asked) == 1  # and nothing is cancelled that has ended


async def test_it_gives_up_after_its_bound() -> None:
    with closed_port() as port:
        client = Client([f"http://127.0.0.1:{port}"], patience_s=0.5)
        with pytest.raises(GaveUp, match="nobody answers"):
            await read(client)
        client.close()


async def test_it_gives_up_after_so_many_tries() -> None:
    with closed_port() as port:
        client = Client([f"http://127.0.0.1:{port}"], tries=2)
        with pytest.raises(GaveUp, match="tried 2 times"):
            await read(client)
        client.close()


async def test_events_without_ids_cannot_be_resumed() -> None:
    async with gateway(stream(b'data: {"choices":[]}\n\n', whole=False)) as only:
        client = Client([only.url])
        with pytest.raises(GaveUp, match="no ids"):
            await read(client)
        client.close()
    assert len(only.asked) == 1


async def test_several_prompts_in_one_body_are_not_mixed_up() -> None:
    other = token(1).replace(b"r_ab", b"r_cd")
    async with gateway(stream(token(1), other, whole=False), refusal(200, "")) as only:
        client = Client([only.url])
        with pytest.raises(GaveUp, match="several prompts"):
            await read(client)
        client.close()


async def test_leaving_early_cancels_the_request() -> None:
    async with gateway(stream(token(1), token(2), whole=False), refusal(200, "")) as only:
        client = Client([only.url])
        async with contextlib.aclosing(client.stream(PATH, {"prompt": "a"})) as events:
            async for _ in events:
                break
        client.close()
    assert [asked.line.split()[:2] for asked in only.asked] == [
        ["POST", PATH],
        ["DELETE", "/v1/requests/r_ab"],
    ]


async def test_a_reply_that_is_not_streamed_is_asked_for_again_with_its_key() -> None:
    answer = {"choices": [{"text": "w1"}]}
    whole = stream(json.dumps(answer).encode())
    async with gateway(stream(whole=False), refusal(503, "busy"), whole) as only:
        client = Client([only.url], patience_s=30)
        assert await client.whole(PATH, {"prompt": "a"}) == answer
        client.close()
    assert [asked.body for asked in only.asked] == [{"prompt": "a", "stream": False}] * 3
    assert len({asked.headers["idempotency-key"] for asked in only.asked}) == 1
    async with gateway(refusal(400, "wrong")) as only:
        client = Client([only.url])
        with pytest.raises(Refused, match="wrong"):
            await client.whole(PATH, {"prompt": "a"})
        client.close()


async def test_a_connection_to_itself_is_seen() -> None:
    # What becomes of an attempt while a gateway restarts, once in some thousand times.
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        own.connect(own.getsockname())
        own.setblocking(False)
        loop = asyncio.get_running_loop()
        transport, connection = await loop.create_connection(Connection, sock=own)
        assert connection.is_to_itself
        transport.abort()
    async with gateway(b"") as other:
        port = int(other.url.rpartition(":")[2])
        transport, connection = await loop.create_connection(Connection, "127.0.0.1", port)
        assert not connection.is_to_itself
        await other.met.wait()
        transport.abort()
