"""What ranks say to each other beside their tensors, over sockets: a byte for the kind, a length, and so many bytes."""

import asyncio
import socket
import struct
from enum import IntEnum

_HEAD = struct.Struct("<BI")


class Order(IntEnum):
    """From the first rank to the others. What they are told to do they do in the same order."""

    START = 1  # a `Place` as JSON
    PLAN = 2  # a serialized StepPlan: to be kept, and what it fetches pulled
    LAUNCH = 3  # the lease and the step of a plan
    COLLECT = 4  # the oldest launched step
    RESET = 5


class Report(IntEnum):
    """From one of the others to the first rank."""

    ALIVE = 1
    FETCHED = 2  # the number of a fetch whose artifact is here
    LOST = 3  # the number of one whose artifact could not be had
    FAILED = 4  # why, as text: the rank ends


STEP = struct.Struct("<qq")  # lease and step
NUMBER = struct.Struct("<q")


def send(to: socket.socket, kind: int, payload: bytes = b"") -> None:
    """Raises OSError if the other end is gone, or does not read for as long as the socket's timeout."""
    to.sendall(_HEAD.pack(kind, len(payload)) + payload)


def receive(source: socket.socket) -> tuple[int, bytes]:
    """Waits for the next message. Raises EOFError if the other end is gone, TimeoutError after the socket's timeout."""
    kind, size = _HEAD.unpack(_read(source, _HEAD.size))
    return kind, _read(source, size)


async def read(source: asyncio.StreamReader) -> tuple[int, bytes]:
    """The next message. Raises EOFError if the other end is gone."""
    kind, size = _HEAD.unpack(await source.readexactly(_HEAD.size))
    return kind, await source.readexactly(size)


def _read(source: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        try:
            more = source.recv(size - len(found))
        except ConnectionError:
            more = b""
        if not more:
            raise EOFError
        found += more
    return bytes(found)
