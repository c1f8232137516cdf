"""A gateway that everybody calls at once is busy, not dead; one whose event loop stands still is dead."""

import asyncio
import contextlib
import json
import resource
import signal
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.support.processes.system import System

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]

CALLERS = 2000
BODY = json.dumps(
    {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 2,
        "stream": True,
    }
).encode()


async def ask(port: int, begin: asyncio.Event) -> bytes:
    """All that comes back on a connection of its own."""
    await begin.wait()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(BODY), BODY)
        )
        return await reader.read()
    finally:
        writer.close()


async def ask_all(port: int) -> list[bytes | BaseException]:
    begin = asyncio.Event()
    asking = [asyncio.create_task(ask(port, begin)) for _ in range(CALLERS)]
    begin.set()
    return await asyncio.gather(*asking, return_exceptions=True)


def is_whole(reply: bytes | BaseException) -> bool:
    """Whether it is a stream to its end, or a refusal that says when to come back."""
    if not isinstance(reply, bytes):
        return False
    if reply.startswith(b"HTTP/1.1 200"):
        return reply.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    head, _, body = reply.partition(b"\r\n\r\n")
    return b"retry-after" in head.lower() and "error" in json.loads(body)


@contextlib.contextmanager
def usual_open_files() -> Iterator[None]:
    """Processes that are started in the block may open as many files as most systems let them at first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_two_thousand_callers_at_once_are_answered_and_a_standstill_ends_it() -> None:
    with contextlib.ExitStack() as stack:
        with usual_open_files():
            system = stack.enter_context(System(None, "--language-model-only"))
        gateway = system.pids()["gateway"]
        replies = asyncio.run(ask_all(system.port))
        broken = [reply for reply in replies if not is_whole(reply)]
        assert system.pids().get("gateway") == gateway, system.log
        assert not broken, f"{len(broken)} of {len(replies)}: {broken[:3]}\n{system.log}"
        assert any(isinstance(r, bytes) and r.startswith(b"HTTP/1.1 200") for r in replies)

        system.kill("gateway", with_signal=signal.SIGSTOP)
        deadline = time.monotonic() + 60
        while psutil.pid_exists(gateway[0]) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not psutil.pid_exists(gateway[0])
        system.wait_ready()
