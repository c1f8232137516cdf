"""A client that takes very little processor time: a plain socket, and the time at which each piece of a stream came."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Stream:
    """When a request was sent, and when each event with tokens came: (seconds, tokens in it)."""

    sent: float
    events: list[tuple[float, int]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)  # of the tokens

    @property
    def tokens(self) -> int:
        """Tokens received."""
        return sum(count for _, count in self.events)

    @property
    def first(self) -> float:
        """Seconds from the request to the first token."""
        return self.events[0][0] - self.sent

    @property
    def between(self) -> list[float]:
        """Seconds between tokens; an event with several counts as many, evenly spaced."""
        gaps = []
        for (before, _), (now, count) in zip(self.events, self.events[1:], strict=False):
            gaps += [(now - before) / count] * count
        return gaps


async def ask(port: int, model: str, prompt: list[int], count: int, **more: Any) -> Stream:
    """One streamed completion of token ids, greedy, of exactly `count` tokens; `more` are fields of its body."""
    body = json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            **more,
        }
    ).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    stream = Stream(time.perf_counter())
    writer.write(head + body)
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(f"{status!r} {(await reader.read(2000))!r}")
    while line := await reader.readline():
        now = time.perf_counter()
        at = line.find(b'"token_ids":')
        if line.startswith(b"data: ") and at > 0:
            ids = line[at : line.index(b"]", at)].partition(b"[")[2]
            if ids.strip():
                stream.events.append((now, ids.count(b",") + 1))
                stream.ids += map(int, ids.split(b","))
    writer.close()
    return stream
