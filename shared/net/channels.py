"""Connections to other services, by address. A restarted service has a new address; the old one is never announced as
gone.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import grpc.aio

from shared.net import internal_token, tasks, transport

MAX_MESSAGE_BYTES = 16 << 20

# Pings find a peer that is frozen or cut off while TCP still looks alive: the kernel acknowledges for a stopped
# process, so without the ping timeout every call to it waits for its whole deadline.
KEEPALIVE: list[tuple[str, Any]] = [
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]

_UNUSED_S = 60.0


def open_channel(address: str, max_message_bytes: int = MAX_MESSAGE_BYTES) -> grpc.aio.Channel:
    """Opens a channel to `host:port` or `unix:/path`. Connects at the first call."""
    opened = transport.channel(
        address,
        options=[
            *KEEPALIVE,
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1_000),
            # Names are resolved here and addresses are on loopback or in the cluster: never by a proxy.
            ("grpc.enable_http_proxy", 0),
        ],
    )
    return internal_token.with_token(opened)


class _Connection(Protocol):
    async def close(self) -> None:
        """Ends it and the calls under way."""


_C = TypeVar("_C", bound=_Connection)


@dataclass(slots=True)
class _Entry(Generic[_C]):
    connection: _C
    calls: int = 0
    used_at: float = 0.0


class Connections(Generic[_C]):
    """One connection for each address, opened at first use. Those unused for `unused_s` are closed when another one is
    opened, so that dead peers cost nothing; a live one is connected to again.
    """

    def __init__(self, open_connection: Callable[[str], _C], unused_s: float = _UNUSED_S) -> None:
        self._open = open_connection
        self._unused_s = unused_s
        self._entries: dict[str, _Entry[_C]] = {}
        self._closing: dict[asyncio.Task[None], None] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def calls(self, address: str) -> int:
        """Number of calls under way to an address."""
        entry = self._entries.get(address)
        return entry.calls if entry is not None else 0

    @contextlib.contextmanager
    def use(self, address: str) -> Iterator[_C]:
        """The connection to an address, for one call: it stays open inside."""
        entry = self._entries.get(address)
        if entry is None:
            self._close_unused()
            entry = self._entries[address] = _Entry(self._open(address))
        entry.calls += 1
        try:
            yield entry.connection
        finally:
            entry.calls -= 1
            entry.used_at = asyncio.get_running_loop().time()

    async def close(self) -> None:
        """Closes all of them, and with them the calls under way."""
        entries, self._entries = list(self._entries.values()), {}
        for entry in entries:
            await entry.connection.close()
        await tasks.end(*self._closing)

    def _close_unused(self) -> None:
        horizon = asyncio.get_running_loop().time() - self._unused_s
        for address, entry in list(self._entries.items()):
            if not entry.calls and entry.used_at < horizon:
                del self._entries[address]
                task = asyncio.create_task(entry.connection.close())
                self._closing[task] = None
                task.add_done_callback(lambda done: self._closing.pop(done, None))


class Channels(Connections[grpc.aio.Channel]):
    """gRPC channels by address."""

    def __init__(
        self,
        open_channel: Callable[[str], grpc.aio.Channel] = open_channel,
        unused_s: float = _UNUSED_S,
    ) -> None:
        super().__init__(open_channel, unused_s)
