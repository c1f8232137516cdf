"""How much a peer of the gRPC server has sent on its connection, which gRPC does not say while it receives: the
kernel's count, found by the peer's address among this process's sockets.
"""

import asyncio
import contextlib
import os
import socket
import struct
from urllib.parse import unquote

# Offset of tcpi_bytes_received in struct tcp_info (linux/tcp.h), 64 bits; Linux 4.1.
_BYTES_RECEIVED = 128
_END = _BYTES_RECEIVED + 8
_SEARCH_S = 0.5  # between searches for sockets: one takes 20 us of a thread for each


class PeerProgress:
    """Bytes received by connection. Remembers where sockets are, and searches for those of new peers in a thread."""

    def __init__(self) -> None:
        self._descriptors: dict[tuple[str, int], int] = {}
        self._search: asyncio.Future[dict[tuple[str, int], int]] | None = None
        self._not_before = 0.0

    def received(self, peer: str) -> int | None:
        """Bytes that have come from a peer as gRPC names it ("ipv4:192.0.2.1:4000") since it connected; None where that
        is not known, or not yet. Called on an event loop.
        """
        address = _address(peer)
        if address is None:
            return None
        descriptor = self._descriptors.get(address)
        if descriptor is None:
            self._begin_search()
            return None
        found = _look(descriptor)
        if found is None or found[0] != address:
            del self._descriptors[address]  # closed, and perhaps another one's now
            return None
        return found[1]

    def _begin_search(self) -> None:
        loop = asyncio.get_running_loop()
        if self._search is None and loop.time() >= self._not_before:
            self._search = loop.run_in_executor(None, _connected)
            self._search.add_done_callback(self._end_search)

    def _end_search(self, search: "asyncio.Future[dict[tuple[str, int], int]]") -> None:
        self._search = None
        if not search.cancelled() and search.exception() is None:
            self._descriptors = search.result()
            self._not_before = search.get_loop().time() + _SEARCH_S


def _address(peer: str) -> tuple[str, int] | None:
    kind, _, rest = peer.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return _plain(host.strip("[]")), int(port)


def _connected() -> dict[tuple[str, int], int]:
    """The descriptors of this process's TCP connections by their peers."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        looked = _look(int(name))
        if looked is not None:
            found[looked[0]] = int(name)
    return found


def _look(descriptor: int) -> tuple[tuple[str, int], int] | None:
    """Whom a socket is connected to, and how many bytes have come; None for what is no TCP connection."""
    with contextlib.suppress(OSError):
        borrowed = socket.socket(fileno=descriptor)
        try:
            if borrowed.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            host, port, *_ = borrowed.getpeername()
            info = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _END)
        finally:
            borrowed.detach()
        if len(info) == _END:
            return (_plain(host), port), struct.unpack_from("Q", info, _BYTES_RECEIVED)[0]
    return None


def _plain(host: str) -> str:
    """An address in one form: IPv4 over a socket of IPv6 is IPv4."""
    return host.partition("%")[0].removeprefix("::ffff:")
