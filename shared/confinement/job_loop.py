"""What a confined process does for its owner (`processes`): one job after another, within bounds of memory and time.

Within one operation nothing of Python can stop a job, so the kernel does: the process may take so much memory and, for
each job, so much processor time (which the owner sets), and reaches no file, network or other process.

Messages go over standard input, which is a socket, both ways (`messages`).
"""

import json
import marshal
import os
import resource
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, BinaryIO

from shared.confinement.confinement import confine
from shared.confinement.messages import LENGTHS, NO_MEMORY

# A process that holds this much more than before its first job is not used again: what jobs have left behind would
# count for the next.
_GROWN_BYTES = 64 << 20


def answer_jobs(
    memory_bytes: int, do: Callable[[dict[str, Any]], tuple[str, dict[str, Any]]]
) -> None:
    """Says what is missing of the confinement, then answers each job with the text and the values that `do` gives,
    until its input ends. All that `do` needs must have been imported.
    """
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(0), "wb")
    sizes = os.open("/proc/self/statm", os.O_RDONLY)
    held = confine(memory_bytes, 0)
    start = _held(sizes)
    _send(sink, asdict(held))
    try:
        while (job := _receive(source)) is not None:
            text, answer = do(job)
            grown = _held(sizes) - start > _GROWN_BYTES
            _send(sink, {**answer, "last": grown}, text)
            if grown:
                return
    except MemoryError:
        os._exit(NO_MEMORY)  # nothing is taken for granted, not even memory for an answer


def _held(sizes: int) -> int:
    """Bytes of the address space that this process has taken."""
    os.lseek(sizes, 0, os.SEEK_SET)
    return int(os.read(sizes, 64).split()[0]) * resource.getpagesize()


def _receive(source: BinaryIO) -> dict[str, Any] | None:
    head = source.read(LENGTHS.size)
    if len(head) < LENGTHS.size:
        return None
    length, _ = LENGTHS.unpack(head)
    job: dict[str, Any] = marshal.loads(source.read(length))
    return job


def _send(sink: BinaryIO, message: dict[str, Any], text: str = "") -> None:
    head = json.dumps({**message, "processor_s": time.process_time()}).encode()
    body = text.encode("utf-8", "surrogatepass")
    sink.write(LENGTHS.pack(len(head), len(body)) + head + body)
    sink.flush()
