"""A Redis that comes back without its last writes, as after its host has lost power."""

import asyncio
import shutil
from pathlib import Path

from redis.asyncio import Redis

from services.launcher.redis.embedded_redis import EmbeddedRedis


async def written(server: EmbeddedRedis) -> None:
    """Waits until all that Redis has answered is in its file: while the disk is slow, it writes some of it later."""
    async with Redis.from_url(server.url) as client, asyncio.timeout(60):
        while (await client.info("persistence"))["aof_buffer_length"]:
            await asyncio.sleep(0.01)


async def keep_copy(server: EmbeddedRedis) -> Path:
    """A copy of what Redis has on disk now."""
    copy = server.folder.with_name("copy")
    await written(server)
    shutil.copytree(server.folder, copy)
    return copy


async def go_back_to(server: EmbeddedRedis, copy: Path) -> None:
    """Kills Redis and starts it with the file of the copy."""
    server.kill()
    shutil.rmtree(server.folder)
    shutil.copytree(copy, server.folder)
    await asyncio.to_thread(server.start)
