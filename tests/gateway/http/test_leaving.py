"""Clients that leave at any moment, and a server that stops under them, leave no error in the log."""

import asyncio
import json
import logging
import random
import ssl
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop
from tokenizers import Tokenizer

from services.gateway.gateway import open_gateway
from tessera.gateway.v1.chat_pb2 import ChatMessage, ChatRequest, ContentPart
from tessera.gateway.v1.chat_pb2_grpc import ChatServiceStub
from tests.support.gateway.stage import open_stage
from tests.support.network.certificates import Certificates, make_certificates

LONGEST_S = 0.4  # in which a client leaves; an answer takes longer


def request(stream: bool) -> bytes:
    """A whole request."""
    asked = {"messages": [{"role": "user", "content": "hello"}], "stream": stream}
    body = json.dumps(asked).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Leavers:
    """Clients of one gateway, each with a way and a moment of leaving of its own."""

    def __init__(self, port: int, grpc_address: str, certificates: Certificates | None) -> None:
        self._port, self._address = port, grpc_address
        self._tls: ssl.SSLContext | None = None
        self._secure: grpc.ChannelCredentials | None = None
        if certificates is not None:
            self._tls = ssl.create_default_context(cafile=certificates.authority)
            self._secure = grpc.ssl_channel_credentials(certificates.authority.read_bytes())
        self._random = random.Random(1)

    async def rest(self) -> None:
        """One that asks, or begins to, and closes or resets its connection."""
        draw = self._random
        name = "localhost" if self._tls else None
        _, writer = await asyncio.open_connection(
            "127.0.0.1", self._port, ssl=self._tls, server_hostname=name
        )
        whole = request(draw.random() < 0.5)
        writer.write(whole[: draw.choice([len(whole), len(whole), 20, len(whole) - 1])])
        await asyncio.sleep(draw.random() * LONGEST_S)
        if draw.random() < 0.5:
            writer.transport.abort()
        writer.close()

    async def handshake(self) -> None:
        """One that connects and leaves."""
        _, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(b"\x16\x03\x01"[: self._random.randrange(4)])
        await asyncio.sleep(self._random.random() * 0.1)
        writer.close()

    async def grpc(self) -> None:
        """One that cancels its call, or closes its channel."""
        channel = (
            grpc.aio.insecure_channel(self._address)
            if self._secure is None
            else grpc.aio.secure_channel(self._address, self._secure)
        )
        message = ChatMessage(role="user", content=[ContentPart(text="hello")])
        call = ChatServiceStub(channel).Chat(ChatRequest(messages=[message]))
        reading = asyncio.ensure_future(_read(call))
        await asyncio.sleep(self._random.random() * LONGEST_S)
        if self._random.random() < 0.5:
            call.cancel()
        await channel.close()
        await asyncio.wait([reading])
        if not reading.cancelled():
            reading.exception()


async def _read(call: Any) -> None:
    async for _ in call:
        pass


async def pause(rid: str, index: int) -> None:
    """Before each token."""
    await asyncio.sleep(0.02)


@pytest.mark.parametrize("with_tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_who_leaves_writes_no_traceback(
    loop: Any,
    with_tls: bool,
    redis_url: str,
    model_folder: Path,
    tokenizer: Tokenizer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """On the loop that services run on, and on asyncio's own."""
    certificates = make_certificates(tmp_path) if with_tls else None
    errors: list[dict[str, Any]] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: errors.append(what))
        async with open_stage(redis_url, model_folder, tokenizer) as stage:
            stage.scheduler.step = pause
            gateway = stage.gateway
            if certificates is None:
                await leave(int(gateway.url.rsplit(":", 1)[1]), gateway.grpc_address)
                return
            changes = {"ssl_certfile": certificates.server}
            async with open_gateway(stage.settings.model_copy(update=changes)) as secure:
                await leave(int(secure.url.rsplit(":", 1)[1]), secure.grpc_address)

    async def leave(port: int, address: str) -> None:
        leavers = Leavers(port, address, certificates)
        jobs = [leavers.rest() for _ in range(40)] + [leavers.grpc() for _ in range(15)]
        jobs += [leavers.handshake() for _ in range(10)]
        await asyncio.gather(*jobs)
        staying = [asyncio.ensure_future(leavers.rest()) for _ in range(5)]
        await asyncio.sleep(LONGEST_S / 2)  # the server stops while these are there
        await asyncio.wait(staying)

    with asyncio.Runner(loop_factory=loop) as runner, caplog.at_level(logging.WARNING):
        runner.run(run())
    assert errors == []
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err + caplog.text
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []
