"""A Redis that cannot write refuses for as long as that lasts; no accepted write is lost."""

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from services.launcher.redis.embedded_redis import EmbeddedRedis
from shared.errors import Unavailable
from shared.net.redis.connection import connection_of
from tests.support.queue.client import STOP, QueueClient


class FillableRedis(EmbeddedRedis):
    """Its file can be kept from growing, as a full disk does."""

    @property
    def command(self) -> list[str]:
        # The signal that comes with the limit would end it; a full disk sends none.
        return ["sh", "-c", "trap '' XFSZ; exec \"$@\"", "sh", *super().command]

    def fill_disk(self) -> None:
        size = sum(file.stat().st_size for file in self.folder.rglob("*.aof"))
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (size + 100, resource.RLIM_INFINITY))

    def free_disk(self) -> None:
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, unlimited)


@pytest.fixture
def server(short_tmp: Path) -> Iterator[FillableRedis]:
    with FillableRedis(short_tmp / "redis", short_tmp / "r.sock") as server:
        yield server


@pytest.fixture
async def full(server: FillableRedis) -> AsyncIterator[QueueClient]:
    client = QueueClient(server.url)
    yield client
    await client.redis.aclose()


async def test_with_a_full_disk_no_accepted_write_is_lost(
    server: FillableRedis, full: QueueClient
) -> None:
    await full.scheduler("a")
    running = await full.admit(max_tokens=1000)
    assert await full.take("a") == [running]
    await full.append("a", running, 0, [0])
    server.fill_disk()
    accepted: list[str] = []
    at = 1
    with pytest.raises(Unavailable, match="MISCONF"):
        while True:
            accepted.append(await full.admit())
            _, at = await full.append("a", running, at, list(range(at, at + 10)))
    # All who write are told; reading goes on.
    for refused in (
        full.take("a"),
        full.scheduler("a"),
        full.admit(),
        full.queue.cancel(running),
        full.reserve("r", max_requests=1000, max_tokens=100_000),  # what was accepted above is less
    ):
        with pytest.raises(Unavailable):
            await refused
    assert await full.tokens(running) == list(range(at))
    # A connection that breaks meanwhile is made again.
    connection_of(full.redis).abort()
    assert await full.tokens(running) == list(range(at))

    server.free_disk()
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(Unavailable):
                await full.scheduler("a")
                break
            await asyncio.sleep(0.1)
    assert await full.append("a", running, at, [at], STOP) == (0, at + 1)
    # What was acknowledged while the disk was full is on it now. A sync that is under way puts writing off for up to
    # two seconds, in which a kill would lose what was acknowledged in them.
    assert (await full.redis.execute_command("WAITAOF", 1, 0, 60_000))[0] == 1
    server.kill()
    await asyncio.to_thread(server.start)
    with contextlib.suppress(Unavailable):
        await full.queue.depth()
    assert await full.tokens(running) == list(range(at + 1))
    assert await full.ending(running) == STOP
    await full.redis.delete(f"{full.keys.prefix}:recovery")
    await full.scheduler("a")
    assert await full.take("a", 1000, 10**6) == accepted
    assert (await full.queue.depth())[0] == len(accepted)


@pytest.mark.parametrize("client", ["lua"], indirect=True)
async def test_a_full_memory_refuses_whole_scripts(client: QueueClient) -> None:
    await client.scheduler("a")
    running, waiting = await client.admit(), await client.admit()
    assert await client.take("a", 1) == [running]
    depth = await client.queue.depth()
    await client.redis.config_set("maxmemory", 1)
    try:
        for refused in (
            client.append("a", running, 0, [1], STOP),
            client.take("a"),
            client.reserve("r"),
        ):
            with pytest.raises(Unavailable, match="OOM"):
                await refused
        assert await client.queue.depth() == depth
    finally:
        await client.redis.config_set("maxmemory", 0)
    assert await client.take("a") == [waiting]
    assert await client.append("a", running, 0, [1], STOP) == (0, 1)
    assert await client.queue.depth() == (1, 8)


async def test_a_demoted_master_is_disconnected(private_redis: EmbeddedRedis) -> None:
    client = QueueClient(private_redis.url)
    line = connection_of(client.redis)
    await client.scheduler("a")
    before = await line.call("CLIENT", "ID")
    await client.redis.execute_command("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(Unavailable, match="READONLY"):
        await client.admit()
    await client.redis.execute_command("REPLICAOF", "NO", "ONE")
    await client.admit()
    assert await line.call("CLIENT", "ID") != before
    await client.redis.aclose()
