"""How much has come on a connection is known by the address of its peer."""

import asyncio
import socket

import pytest

from services.gateway.api.tessera.peer_progress import PeerProgress


async def until(progress: PeerProgress, peer: str, received: int | None) -> None:
    async with asyncio.timeout(60):
        while progress.received(peer) != received:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("host", "family", "peer"),
    [
        ("127.0.0.1", socket.AF_INET, "ipv4:127.0.0.1:{}"),
        ("::1", socket.AF_INET6, "ipv6:%5B::1%5D:{}"),
    ],
)
async def test_bytes_of_a_connection_are_counted_until_it_is_closed(
    host: str, family: socket.AddressFamily, peer: str
) -> None:
    progress = PeerProgress()
    with socket.create_server((host, 0), family=family) as listening:
        for sent in (1000, 70):  # the second one has the first one's descriptor
            client = socket.create_connection(listening.getsockname()[:2])
            accepted, _ = listening.accept()
            with accepted:
                name = peer.format(client.getsockname()[1])
                client.sendall(b" " * sent)
                await until(progress, name, sent)
                client.sendall(b" " * 5)
                await until(progress, name, sent + 5)
                client.close()
            await until(progress, name, None)


async def test_what_is_no_address_is_not_known() -> None:
    progress = PeerProgress()
    assert [progress.received(peer) for peer in ("unix:/tmp/s", "", "ipv4:nobody")] == [None] * 3
