"""Looks names up in threads of its own, so that slow name servers hold up nobody but those who ask for their names."""

import asyncio
import contextlib
import socket
import threading
from typing import Any

from shared.errors import Overloaded

_MOST_THREADS = 64
_MOST_WAITING = 256
# Of names that end alike, which one name server answers for. A lookup that nobody waits for any more goes on until
# the system gives it up, and holds its place so long.
_MOST_OF_A_DOMAIN = 2


class NameResolver:
    """The addresses of names; who asks for a name that is being looked up gets the same answer."""

    def __init__(self) -> None:
        self._under_way: dict[tuple[str, int], asyncio.Task[list[str]]] = {}
        self._domains: dict[str, tuple[asyncio.Semaphore, int]] = {}
        self._threads = asyncio.Semaphore(_MOST_THREADS)

    async def resolve(self, host: str, port: int) -> list[str]:
        """Its addresses, at least one. Raises socket.gaierror, UnicodeError, Overloaded."""
        lookup = self._under_way.get((host, port))
        if lookup is None:
            if len(self._under_way) >= _MOST_THREADS + _MOST_WAITING:
                raise Overloaded(
                    "MEDIA_NAMES",
                    f"{len(self._under_way)} names of media's hosts are being looked up, the most that"
                    " are; retry",
                    retry_after_s="2",
                )
            lookup = asyncio.create_task(self._look_up(host, port))
            self._under_way[host, port] = lookup
            lookup.add_done_callback(lambda done: self._forget(host, port, done))
        return await asyncio.shield(lookup)

    async def close(self) -> None:
        """Waits for nobody; threads that are still asking end by themselves."""
        lookups = list(self._under_way.values())
        for lookup in lookups:
            lookup.cancel()
        await asyncio.gather(*lookups, return_exceptions=True)

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

    def _forget(self, host: str, port: int, lookup: "asyncio.Task[list[str]]") -> None:
        del self._under_way[host, port]
        if not lookup.cancelled():
            lookup.exception()  # told to all who asked; to nobody when all have gone away


def _ask(host: str, port: int, answer: "asyncio.Future[list[str]]") -> None:
    found: list[str] | Exception
    try:
        entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        found = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
    except (OSError, UnicodeError) as error:
        found = error
    with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
        answer.get_loop().call_soon_threadsafe(_tell, answer, found)


def _tell(answer: "asyncio.Future[list[str]]", found: list[str] | Exception) -> None:
    if answer.done():
        return
    if isinstance(found, Exception):
        answer.set_exception(found)
    else:
        answer.set_result(found)
