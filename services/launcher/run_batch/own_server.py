"""The services that a run starts for itself, as `tessera serve` does, and ends."""

import asyncio
import contextlib
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx

from services.launcher.service_commands import gateway_addresses
from services.launcher.settings import ServeSettings
from shared.child_process.die_with_parent import die_with_parent
from shared.net.tasks import end

_LOOK_S = 0.2
_PROG = "tessera run-batch"


class NotServed(Exception):
    """The services did not start, or ended; the message is for users."""


@contextlib.asynccontextmanager
async def own_server(arguments: Sequence[str]) -> AsyncIterator[tuple[str, str]]:
    """Starts `tessera serve` with these arguments, on free ports and with a state of its own unless they say otherwise.
    Gives its URL and a key for it. Raises NotServed.
    """
    with tempfile.TemporaryDirectory(prefix="tessera-run-") as folder:
        first, second = _free_ports()
        usual = {
            "--port": str(first),
            "--grpc-port": str(second),
            "--state-dir": str(Path(folder) / "state"),
        }
        given = {argument.partition("=")[0] for argument in arguments}
        flags = [
            word for name, value in usual.items() if name not in given for word in (name, value)
        ]
        settings = ServeSettings.load([*arguments, *flags], prog=_PROG)
        if settings.ssl_certfile is not None:
            raise NotServed("--ssl-certfile: the services of a run speak to it alone, without TLS")
        url = gateway_addresses(settings)[0].url
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.launcher", "serve", *arguments, *flags),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sys.stderr,
            preexec_fn=die_with_parent(),
            # Ctrl-C is for the run, which ends them.
            start_new_session=True,
        )
        try:
            await _ready(url, process)
            yield url, next(iter(settings.api_keys), "")
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


async def _ready(url: str, process: asyncio.subprocess.Process) -> None:
    ended = asyncio.create_task(process.wait())
    try:
        async with httpx.AsyncClient(trust_env=False) as client:
            while not ended.done():
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(f"{url}/health/ready")).status_code == 200:
                        return
                await asyncio.sleep(_LOOK_S)
    finally:
        await end(ended)
    raise NotServed("the services did not start: what is wrong stands above")


def _free_ports() -> tuple[int, int]:
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        return first.getsockname()[1], second.getsockname()[1]
