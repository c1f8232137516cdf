"""What ranks say to each other beside their tensors, over sockets: a byte for the kind, a length, and so many bytes."""

import asyncio
import socket
import struct
from enum import IntEnum

import numpy as np

Pairs = np.ndarray[tuple[int, int], np.dtype[np.int32]]

_HEAD = struct.Struct("<BI")


class Order(IntEnum):
    """From the first rank to the others. What they are told to do they do in the same order."""

    START = 1  # a `Place` as JSON
    PLAN = 2  # a serialized StepPlan: to be kept, and what it fetches pulled
    LAUNCH = 3  # the lease and the step of a plan, and its drafts where the first rank guesses them
    COLLECT = 4  # the oldest launched step
    RESET = 5


class Report(IntEnum):
    """From one of the others to the first rank."""

    ALIVE = 1
    FETCHED = 2  # the number of a fetch whose artifact is here
    LOST = 3  # the number of one whose artifact could not be had
    FAILED = 4  # why, as text: the rank ends


_STEP = struct.Struct("<qq")  # lease and step
NUMBER = struct.Struct("<q")


def launch(lease: int, step: int, drafts: Pairs | None) -> bytes:
    """The payload of LAUNCH; drafts: rows and tokens [n, 2], or None where the plan asks for none."""
    head = _STEP.pack(lease, step)
    return head if drafts is None else head + drafts.astype("<i4").tobytes()


def read_launch(payload: bytes) -> tuple[int, int, Pairs]:
    """Of the payload of LAUNCH lease, step and drafts [n, 2]."""
    lease, step = _STEP.unpack_from(payload)
    drafts = np.frombuffer(payload, "<i4", offset=_STEP.size).astype(np.int32)
    return lease, step, drafts.reshape(-1, 2)


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
