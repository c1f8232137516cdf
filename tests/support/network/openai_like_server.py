"""A small server with OpenAI's API whose every byte and pause the test decides."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Answer = Callable[[dict[str, Any]], Sequence[bytes]]


@dataclass
class Played:
    """What was asked, and how it is answered: `answer(body)` gives the pieces of the stream, each sent on its own."""

    port: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    connections: int = 0
    most_at_once: int = 0
    answer: Answer = lambda body: events(body["max_tokens"])
    refuses: tuple[str, ...] = ()  # fields that get a 400
    framing: str = "chunked"  # or "close": the answer ends with its connection
    pause_s: float = 0.0  # before each piece
    _now: int = 0

    @property
    def url(self) -> str:
        """What a client is pointed at."""
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                path = head.split(" ", 2)[1]
                length = int(head.lower().split("content-length:")[1].split()[0])
                body = json.loads(await reader.readexactly(length) or b"{}")
                self._now += 1
                self.most_at_once = max(self.most_at_once, self._now)
                await self._reply(path, body, writer)
                self._now -= 1
                if self.framing == "close":
                    break
        writer.close()

    async def _reply(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            _whole(writer, 200, {"data": [{"id": "played"}]})
            return
        self.paths.append(path)
        self.bodies.append(body)
        refused = [name for name in self.refuses if name in body]
        if refused:
            _whole(writer, 400, {"error": {"message": f"{refused[0]} is unknown"}})
            return
        chunked = self.framing == "chunked"
        kind = "Transfer-Encoding: chunked" if chunked else "Connection: close"
        writer.write(
            f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{kind}\r\n\r\n".encode()
        )
        for piece in self.answer(body):
            await asyncio.sleep(self.pause_s)
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)
            await writer.drain()
        if chunked:
            writer.write(b"0\r\n\r\n")


def _whole(writer: asyncio.StreamWriter, status: int, content: Any) -> None:
    body = json.dumps(content).encode()
    writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))


def events(
    count: int, *, ids: bool = True, usage: bool = True, end: bytes = b"\n\n", each: int = 1
) -> list[bytes]:
    """A completion's stream of `count` tokens, `each` in an event."""
    pieces = []
    for start in range(0, count, each):
        choice: dict[str, Any] = {"index": 0, "text": "w " * min(each, count - start)}
        if ids:
            choice["token_ids"] = list(range(start, min(start + each, count)))
        pieces.append(b"data: " + json.dumps({"choices": [choice]}).encode() + end)
    if usage:
        counts = {"prompt_tokens": 7, "completion_tokens": count}
        counts["prompt_tokens_details"] = {"cached_tokens": 3}  # type: ignore[assignment]
        pieces.append(b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + end)
    return [*pieces, b"data: [DONE]" + end]


@contextlib.asynccontextmanager
async def playing(**changes: Any) -> AsyncIterator[Played]:
    """Runs one inside the block, in this loop."""
    played = Played(**changes)
    server = await asyncio.start_server(played.serve, "127.0.0.1", 0)
    played.port = server.sockets[0].getsockname()[1]
    try:
        yield played
    finally:
        server.close()
