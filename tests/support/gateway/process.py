"""A gateway in a process of its own, which can be killed and shut down."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx

from shared.queue import connect
from shared.queue.keys import Keys
from shared.queue.registry import Directory
from shared.settings import child_environment, python_path
from tests.support.gateway.stage import MODEL, Stage, until_ready
from tests.support.network.http import plain_client

_ROOT = Path(__file__).parents[3]
_START_WITHIN_S = 90  # on a busy machine it imports for many seconds

GatewayProcess = tuple[asyncio.subprocess.Process, httpx.AsyncClient]


@contextlib.asynccontextmanager
async def beside(
    stage: Stage, *flags: str, program: Sequence[str] = ("services.gateway",)
) -> AsyncIterator[GatewayProcess]:
    """Another gateway on the stage's Redis, and a client of it. Whatever happens, it is gone behind the block.
    `program` is the module that runs it, with what goes before its flags.
    """
    settings = stage.settings
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *program, "--model", str(settings.model)),
        *("--redis-url", settings.redis_url, "--port", "0", "--grpc-port", "0", *flags),
        env=child_environment(PYTHONPATH=python_path(_ROOT, _ROOT / "protos")),
        cwd=_ROOT,
    )
    try:
        async with (
            asyncio.timeout(_START_WITHIN_S),
            connect(settings.redis_url) as redis,
            Directory(redis, Keys(MODEL), "gateway") as gateways,
        ):
            while not (found := [m for m in gateways.members if m.address != stage.gateway.url]):
                await gateways.changed()
        async with plain_client(found[0].address, timeout=60) as client:
            await until_ready(client)
            yield process, client
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
