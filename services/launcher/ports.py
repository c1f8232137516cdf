"""Whether ports are free."""

import errno
import itertools
import random
import socket
from functools import partial

from shared.errors import Unavailable

_DRAWN_FROM = range(12_000, 30_000)


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now. Raises Unavailable if the address is not ours."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # As servers do: connections of an earlier one that are still closing do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        raise Unavailable(
            "CANNOT_LISTEN", f"cannot listen on {host}:{port}: {error.strerror or error}"
        ) from error
    return True


def require_free(host: str, ports: dict[str, int]) -> None:
    """Raises Unavailable, naming the flag, if a port is taken or two flags name the same one.

    `ports` is flag -> port, such as {"--port": 8000}.
    """
    seen: dict[int, str] = {}
    for flag, port in ports.items():
        if port in seen:
            raise Unavailable("PORTS_COLLIDE", f"{flag} and {seen[port]} are both {port}")
        seen[port] = flag
        if not is_free(host, port):
            raise Unavailable(
                "PORT_IN_USE",
                f"port {port} of {host} is in use: end what uses it, or give another with "
                f"{flag} (such as {flag} {_next_free(host, port)})",
            )


def _next_free(host: str, port: int) -> int:
    """The next port above it that is free together with the one after it."""
    while port < 65_000:
        port += 2
        if is_free(host, port) and is_free(host, port + 1):
            break
    return port


def free_ports(host: str, count: int) -> list[int]:
    """So many different ports that a server could listen on now, below those that outgoing connections get: none of
    them takes one meanwhile.
    """
    drawn = random.SystemRandom().sample(_DRAWN_FROM, k=len(_DRAWN_FROM))
    found = list(itertools.islice(filter(partial(is_free, host), drawn), count))
    if len(found) < count:
        raise Unavailable("NO_PORT", f"{host} has no {count} free ports")
    return found
