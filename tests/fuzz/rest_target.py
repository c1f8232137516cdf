"""The REST API: raw HTTP/1.1, since a library would not send what is sent here."""

import asyncio
import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.fuzz import bodies
from tests.fuzz.right import other_servers, vectors
from tests.fuzz.uploads import FORM_TYPE
from tests.fuzz.verdict import Broken, ends_in_time

_JSON = "application/json"
ROUTES = [
    ("POST", "/v1/chat/completions"), ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"),
    ("POST", "/tokenize"), ("POST", "/detokenize"), ("POST", "/v1/tokenize"), ("POST", "/v1/detokenize"),
    ("POST", "/v1/chat/completions/"),
    ("POST", "/"), ("POST", "/generate"), ("POST", "/generate_stream"), ("POST", "/infer"), ("POST", "/v1/tokenizer"),
    ("POST", "/v2/models/fuzzed/generate"), ("POST", "/v2/models/fuzzed/generate_stream"),
    ("POST", "/v2/models/fuzzed/infer"), ("POST", "/v2/models/fuzzed/stopInfer"),
    ("POST", "/api/chat"), ("POST", "/api/generate"), ("POST", "/api/show"),
    *(("POST", route) for route in vectors.ROUTES),
    ("POST", "/v1/responses"), ("POST", "/v1/responses"), ("POST", "/v1/responses/input_tokens"),
    ("POST", "/v1/responses/compact"),
    ("POST", "/v1/messages"), ("POST", "/v1/messages"), ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/files"), ("POST", "/v1/batches"), ("POST", "/v1/messages/batches"),
    ("POST", "/v1/load_lora_adapter"), ("POST", "/v1/unload_lora_adapter"),
]  # fmt: skip
_OTHERS = [
    ("GET", "/"), ("GET", "/metrics"), ("GET", "/health/ready"), ("GET", "/v1/models"), ("GET", "/v1/models/a/b"),
    ("GET", "/v1/requests/r_a_b"), ("DELETE", "/v1/requests/%00"), ("GET", "/v1/requests/x/stream"),
    ("GET", "/v1/chat/completions"), ("OPTIONS", "/v1/completions"), ("HEAD", "/"), ("PUT", "/x"), ("GET", "/load"),
    ("GET", "/../../etc/passwd"), ("GET", "/%ff%fe"), ("GET", "//"), ("BREW", "/v1/models"), ("GET", "/tokenizer_info"),
    ("GET", "/openapi.json"), ("GET", "/docs?x"),
    ("GET", "/v1/responses/x"), ("DELETE", "/v1/responses/%00"), ("GET", "/v1/responses/x/input_items?limit=-1"),
    ("POST", "/v1/responses/x/cancel"), ("GET", "/v1/responses/x?stream=true&starting_after=x"),
    ("GET", "/v1/models/"), ("PATCH", "/v1/batches/x/cancel"),
    ("GET", "/v1/files?limit=-1"), ("GET", "/v1/files/expiry"), ("GET", "/v1/files/%00/content"),
    ("DELETE", "/v1/files/x"), ("GET", "/v1/batches?after=expiry"), ("GET", "/v1/batches/sizes"),
    ("POST", "/v1/batches/total/cancel"),
    ("GET", "/v1/messages/batches?before_id=expiry"), ("GET", "/v1/messages/batches/%00/results"),
    ("DELETE", "/v1/messages/batches/msgbatch_x"), ("POST", "/v1/messages/batches/x/y/cancel"),
    ("GET", "/v1/requests//stream/"), ("GET", "/v2/models/a/b/c"), ("GET", "/v2/health/ready"), ("GET", "/v2/models/"),
    ("GET", "/info"), ("GET", "/v2/models/fuzzed/config"), ("POST", "/v2/models/fuzzed/versions/2/infer"),
    ("GET", "/api/tags"), ("GET", "/api/ps"), ("DELETE", "/api/delete"),
]  # fmt: skip
_HEADERS = [
    "Idempotency-Key", "Last-Event-ID", "X-Tessera-Resume", "X-Tessera-Event-Ids", "X-Tessera-Priority",
    "X-Tessera-Request-Timeout", "X-Tessera-Queue-Timeout", "X-Tessera-First-Token-Timeout", "X-Request-Id",
    "Inference-Header-Content-Length",
    "anthropic-version", "x-api-key",
    "Authorization", "traceparent", "Content-Encoding", "Accept", "Cookie", "Expect", "X-Forwarded-For", "TE",
]  # fmt: skip
_HEADER_VALUES = [
    "", "0", "-1", "r_a_b/9e", "1e99", "é", "a" * 20_000, "nan", "Bearer ,", "\t", "x y", "a" * 300,
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sent:
    """The bytes of one request; `orderly` is whether HTTP promises an answer to them."""

    wire: bytes
    orderly: bool


def draw_request(draw: random.Random) -> Sent:
    """One request, seven of eight of them well-formed HTTP around a strange body."""
    if draw.random() < 0.1:
        method, path = draw.choice(_OTHERS)
        return Sent(_head(draw, method, path, None), orderly=True)
    method, path = draw.choice(ROUTES)
    if path.endswith("fuzzed/infer") and draw.random() < 0.4:
        content, json_length = other_servers.with_bytes(draw)
        more = (f"Inference-Header-Content-Length: {json_length}",)
        return Sent(_head(draw, method, path, len(content), more) + content, orderly=True)
    content = bodies.body(draw, path)
    if draw.random() < 0.9:
        kind = FORM_TYPE if path == "/v1/files" else _JSON
        return Sent(_head(draw, method, path, len(content), kind=kind) + content, orderly=True)
    return Sent(_disorderly(draw, method, path, content), orderly=False)


def _head(
    draw: random.Random,
    method: str,
    path: str,
    length: int | None,
    more: Sequence[str] = (),
    kind: str = _JSON,
) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close", *more]
    if length is not None:
        lines += [f"Content-Length: {length}", f"Content-Type: {kind}"]
    while draw.random() < 0.15:
        lines.append(f"{draw.choice(_HEADERS)}: {draw.choice(_HEADER_VALUES)}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _disorderly(draw: random.Random, method: str, path: str, content: bytes) -> bytes:
    """What is no HTTP, or ends too early. The client closes its side behind it."""
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n".encode()
    return draw.choice(
        [
            head + b"Content-Length: %d\r\n\r\n" % (len(content) + 5) + content,
            head + b"Content-Length: -5\r\n\r\n" + content,
            head + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + content,
            head + b"Transfer-Encoding: chunked\r\n\r\n" + b"fffffffffffffffff\r\n" + content,
            head + b"Transfer-Encoding: chunked\r\n\r\n" + b"5\r\nabc",
            head + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
            head + b"Bad Header\r\n\r\n",
            head + b"X: " + bytes(draw.randrange(256) for _ in range(50)) + b"\r\n\r\n",
            head[: draw.randrange(1, len(head))],
            bytes(draw.randrange(256) for _ in range(draw.randrange(1, 200))),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
            b"GET " + b"/" * 70_000 + b" HTTP/1.1\r\n\r\n",
        ]
    )


class RestTarget:
    """Sends, reads the answer whole, and says what is wrong with it."""

    name = "rest"

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port

    async def send(self, draw: random.Random) -> str:
        """The answer's status, "none" where the server closed. Raises Broken."""
        sent = draw_request(draw)
        answer = await ends_in_time(self._exchange(sent))
        if not answer:
            if sent.orderly:
                raise Broken("the connection ended without an answer")
            return "none"
        status, _, _ = answer.partition(b"\r\n")
        code = status.split(b" ")[1].decode() if status.startswith(b"HTTP/1.1 ") else "?"
        if code == "?" or code in ("500", "502", "503", "504"):
            raise Broken(answer[:2000].decode(errors="replace"))
        if code == "200" and (b'"internal_error"' in answer or b'"INTERNAL"' in answer):
            raise Broken(answer[-2000:].decode(errors="replace"))
        return code

    async def _exchange(self, sent: Sent) -> bytes:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(sent.wire)
            with contextlib.suppress(OSError):  # it refuses the rest, and may say why
                if not sent.orderly:
                    writer.write_eof()
                await writer.drain()
            return await _read(reader)
        finally:
            writer.transport.abort()

    async def close(self) -> None:
        """Nothing is held."""


async def _read(reader: asyncio.StreamReader) -> bytes:
    """Up to the end, or to a reset behind an answer to what was not read whole."""
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(1 << 16):
            parts.append(part)
    return b"".join(parts)
