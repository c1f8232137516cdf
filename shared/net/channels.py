"""Channels to peers that come and go: each restart has a new address, and nobody says goodbye to the old one."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc.aio

from shared.net import rpc, tasks

_UNUSED_S = 60.0


@dataclass(slots=True)
class _Line:
    channel: grpc.aio.Channel
    calls: int = 0
    used_at: float = 0.0


class Channels:
    """One for each address, opened at first use. Those that nobody has used for a minute are closed when another one
    is opened: a peer that is alive costs a new connection then, and a dead one nothing any more.
    """

    def __init__(self, open_channel: Callable[[str], grpc.aio.Channel] = rpc.channel) -> None:
        self._open = open_channel
        self._lines: dict[str, _Line] = {}
        self._closing: dict[asyncio.Task[None], None] = {}

    def __len__(self) -> int:
        return len(self._lines)

    @contextlib.contextmanager
    def use(self, address: str) -> Iterator[grpc.aio.Channel]:
        """The channel to an address, which stays open inside."""
        line = self._lines.get(address)
        if line is None:
            self._close_unused()
            line = self._lines[address] = _Line(self._open(address))
        line.calls += 1
        try:
            yield line.channel
        finally:
            line.calls -= 1
            line.used_at = asyncio.get_running_loop().time()

    async def close(self) -> None:
        """Closes all of them, and with them the calls under way."""
        lines, self._lines = list(self._lines.values()), {}
        for line in lines:
            await line.channel.close()
        await tasks.end(*self._closing)

    def _close_unused(self) -> None:
        horizon = asyncio.get_running_loop().time() - _UNUSED_S
        for address, line in list(self._lines.items()):
            if not line.calls and line.used_at < horizon:
                del self._lines[address]
                task = asyncio.create_task(_close(line.channel))
                self._closing[task] = None
                task.add_done_callback(lambda done: self._closing.pop(done, None))


async def _close(channel: grpc.aio.Channel) -> None:
    await channel.close()
