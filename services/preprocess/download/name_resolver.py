"""Resolves host names in threads of its own, so that a slow name server delays nobody but the callers for its names."""

import asyncio
import contextlib
import socket
import threading
from typing import Any

from shared.errors import Overloaded
from shared.net.single_flight import SingleFlight

_MOST_THREADS = 64
_MOST_WAITING = 256
# Of names in one domain, which one name server answers for. A lookup cannot be cancelled: it holds its place until the
# system gives it up.
_MOST_OF_A_DOMAIN = 2


class NameResolver:
    """Addresses of host names; concurrent lookups of one name are one."""

    def __init__(self) -> None:
        self._lookups: SingleFlight[tuple[str, int], list[str]] = SingleFlight()
        self._domains: dict[str, tuple[asyncio.Semaphore, int]] = {}
        self._threads = asyncio.Semaphore(_MOST_THREADS)

    async def resolve(self, host: str, port: int) -> list[str]:
        """Its addresses, at least one. Raises socket.gaierror, UnicodeError, Overloaded."""
        key = (host, port)
        if key not in self._lookups and len(self._lookups) >= _MOST_THREADS + _MOST_WAITING:
            raise Overloaded(
                "MEDIA_NAMES",
                f"{len(self._lookups)} host names of media are being looked up, the limit; retry",
                retry_after_s="2",
            )
        return await self._lookups.run(key, lambda: self._look_up(host, port))

    async def close(self) -> None:
        """Cancels the lookups; their threads end by themselves."""
        await self._lookups.close()

    async def _look_up(self, host: str, port: int) -> list[str]:
        async with self._domain(host), self._threads:
            answer: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
            # Not a pool's thread: the process would wait for those when it ends.
            threading.Thread(
                target=_ask, args=(host, port, answer), name="resolve", daemon=True
            ).start()
            return await answer

    @contextlib.asynccontextmanager
    async def _domain(self, host: str) -> Any:
        name = ".".join(host.rstrip(".").split(".")[-2:])
        places, users = self._domains.get(name, (asyncio.Semaphore(_MOST_OF_A_DOMAIN), 0))
        self._domains[name] = places, users + 1
        try:
            async with places:
                yield
        finally:
            users = self._domains[name][1]
            if users == 1:
                del self._domains[name]
            else:
                self._domains[name] = places, users - 1


def _ask(host: str, port: int, answer: "asyncio.Future[list[str]]") -> None:
    found: list[str] | Exception
    try:
        entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        found = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
    except (OSError, UnicodeError) as error:
        found = error
    with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
        answer.get_loop().call_soon_threadsafe(_set, answer, found)


def _set(answer: "asyncio.Future[list[str]]", found: list[str] | Exception) -> None:
    if answer.done():
        return
    if isinstance(found, Exception):
        answer.set_exception(found)
    else:
        answer.set_result(found)
