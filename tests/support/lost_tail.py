"""A Redis that comes back without its last writes, as after the death of its host."""

import asyncio
import shutil
from pathlib import Path

from services.launcher.embedded_redis import EmbeddedRedis


async def keep_copy(server: EmbeddedRedis) -> Path:
    """A copy of what Redis has on disk now."""
    copy = server.folder.with_name("copy")
    await asyncio.sleep(0.01)  # everything answered before is written
    shutil.copytree(server.folder, copy)
    return copy


async def go_back_to(server: EmbeddedRedis, copy: Path) -> None:
    """Redis dies, and comes back as it was at the time of the copy."""
    server.kill()
    shutil.rmtree(server.folder)
    shutil.copytree(copy, server.folder)
    await asyncio.to_thread(server.start)
