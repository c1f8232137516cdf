"""As much of HTTP/2 as it takes to begin a gRPC call and not to end it."""

import asyncio
import contextlib
import struct
from typing import Self

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 4, 6, 7, 8
_ACK, _END_HEADERS = 1, 4
_WINDOW = 65_535


class UnfinishedCall:
    """A call of a method whose message has `size` bytes, of which the last one never comes. Sends what the server's
    flow control lets it, one frame in `piece_every_s` where that is given; `sent` are the bytes so far.
    """

    def __init__(
        self, port: int, method: str, size: int, piece_every_s: float = 0.0, **metadata: str
    ) -> None:
        self._port, self._method, self._size = port, method, size
        self._metadata = metadata
        self._piece_every_s = piece_every_s
        self._pacing: asyncio.Task[None] | None = None
        self.sent = 0

    def pause(self) -> None:
        """Sends no more."""
        assert self._pacing is not None
        self._pacing.cancel()

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writer.write(_PREFACE + _frame(_SETTINGS, b""))
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": self._method,
            ":authority": "localhost",
            "content-type": "application/grpc",
            "te": "trailers",
            **self._metadata,
        }
        block = b"".join(_literal(name, value) for name, value in headers.items())
        self._writer.write(_frame(_HEADERS, block, _END_HEADERS, 1))
        self._windows = {0: _WINDOW, 1: _WINDOW}
        self._task = asyncio.create_task(self._run())
        if self._piece_every_s:
            self._pacing = asyncio.create_task(self._pace())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        if self._pacing is not None:
            self._pacing.cancel()
        self._writer.close()
        with contextlib.suppress(OSError, EOFError, asyncio.CancelledError):
            await self._task

    async def _pace(self) -> None:
        while True:
            self._send_piece()
            await asyncio.sleep(self._piece_every_s)

    async def _run(self) -> None:
        self._send()
        while True:
            head = await self._reader.readexactly(9)
            length = int.from_bytes(head[:3], "big")
            kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
            payload = await self._reader.readexactly(length)
            if kind == _SETTINGS and not flags & _ACK:
                for name, value in struct.iter_unpack(">HI", payload):
                    if name == 4:  # the initial window of streams
                        self._windows[1] += value - _WINDOW
                self._writer.write(_frame(_SETTINGS, b"", _ACK))
            elif kind == _PING and not flags & _ACK:
                self._writer.write(_frame(_PING, payload, _ACK))
            elif kind == _WINDOW_UPDATE:
                self._windows[stream] += int.from_bytes(payload, "big")
            elif kind == _GOAWAY:
                return
            self._send()

    def _send(self) -> None:
        while not self._piece_every_s and self._send_piece():
            pass

    def _send_piece(self) -> bool:
        """One frame, if there is anything to be sent."""
        whole = b"\0" + self._size.to_bytes(4, "big") if self.sent == 0 else b""
        room = min(*self._windows.values(), 16_384)
        data = whole + b"\0" * (min(room, 5 + self._size - 1 - self.sent) - len(whole))
        if room <= 0 or not data:
            return False
        self._writer.write(_frame(_DATA, data, 0, 1))
        self.sent += len(data)
        for stream in self._windows:
            self._windows[stream] -= len(data)
        return True


def _frame(kind: int, payload: bytes, flags: int = 0, stream: int = 0) -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")
    return head + payload


def _literal(name: str, value: str) -> bytes:
    """A header that is not indexed (RFC 7541, 6.2.2), both strings shorter than 127 bytes."""
    return bytes((0, len(name))) + name.encode() + bytes((len(value),)) + value.encode()
