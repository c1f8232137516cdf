"""Channels to peers that come and go."""

import asyncio

import grpc.aio

from shared.net import channels
from shared.net.channels import Channels


async def test_unused_channels_are_closed_and_those_in_use_stay() -> None:
    opened: list[grpc.aio.Channel] = []

    def open_channel(address: str) -> grpc.aio.Channel:
        opened.append(channels.open_channel(address))
        return opened[-1]

    pool = Channels(open_channel, unused_s=0.0)
    with pool.use("127.0.0.1:1") as first:
        for port in range(2, 30):
            with pool.use(f"127.0.0.1:{port}"):
                pass
            await asyncio.sleep(0.001)
        assert len(pool) == 2  # the one in use and the last
        with pool.use("127.0.0.1:1") as again:
            assert again is first
    await pool.close()
    assert len(opened) == 29
    assert all(c.get_state() is grpc.ChannelConnectivity.SHUTDOWN for c in opened)


async def test_one_that_is_used_often_is_opened_once() -> None:
    opened: list[str] = []

    def open_channel(address: str) -> grpc.aio.Channel:
        opened.append(address)
        return channels.open_channel(address)

    pool = Channels(open_channel)
    for address in ("127.0.0.1:1", "127.0.0.1:2") * 5:
        with pool.use(address):
            pass
    assert opened == ["127.0.0.1:1", "127.0.0.1:2"]
    await pool.close()
