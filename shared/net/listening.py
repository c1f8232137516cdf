"""Whether a process still listens at an address, by the sockets of this machine."""

import asyncio
import socket
from typing import Any

_CONNECT_S = 1.0


async def refuses_connections(address: str) -> bool:
    """Whether the kernel there says that nothing listens at `host:port` or `unix:/path`: the process has ended.

    False where a connection is accepted, as it is for a process that is stopped or hangs, and where nobody answers
    within a second: that proves nothing.
    """
    try:
        async with asyncio.timeout(_CONNECT_S):
            targets = await _targets(address)
            return bool(targets) and all([await _is_refused(*target) for target in targets])
    except OSError:  # among them TimeoutError
        return False


async def _targets(address: str) -> list[tuple[socket.AddressFamily, Any]]:
    """What to connect to: a name may have several addresses."""
    if address.startswith("unix:"):
        return [(socket.AF_UNIX, address.removeprefix("unix:"))]
    host, _, port = address.rpartition(":")
    found = await asyncio.get_running_loop().getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_STREAM
    )
    return [(family, target) for family, _, _, _, target in found]


async def _is_refused(family: socket.AddressFamily, target: Any) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(probe, target)
        except (ConnectionRefusedError, FileNotFoundError):  # the latter of a unix socket
            return True
    return False
