"""Ports for servers of tests, and ports that nothing listens on."""

import contextlib
import random
import socket
from collections.abc import Iterator

# Below those that the kernel gives to outgoing connections: none of them takes a port before its server has started.
_DRAWN_FROM = range(12_000, 30_000)


def free_ports(count: int) -> list[int]:
    """That many different TCP ports of 127.0.0.1 that nothing listened on a moment ago."""
    draw = random.SystemRandom()
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        while len(found) < count:
            probe = stack.enter_context(socket.socket())
            port = draw.choice(_DRAWN_FROM)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                found.append(port)
        return found


@contextlib.contextmanager
def closed_port() -> Iterator[int]:
    """A TCP port of 127.0.0.1 that refuses connections, held so that no other process listens there."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        yield port
