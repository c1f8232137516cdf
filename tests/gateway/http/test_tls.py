"""TLS of the gateway's REST and gRPC servers, with and without client certificates."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.gateway.gateway import Gateway, open_gateway
from services.gateway.settings import GatewaySettings
from shared.client import Client
from shared.client.http import HttpClient, HttpError
from shared.errors import InvalidRequest
from shared.net import healthcheck
from shared.net.server_tls import ServerTls
from tests.support.gateway.stage import ANSWER, MODEL, Stage
from tests.support.network.certificates import Certificates, make_certificates


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return make_certificates(tmp_path)


@contextlib.asynccontextmanager
async def opened(stage: Stage, **files: Any) -> AsyncIterator[Gateway]:
    """A gateway with TLS beside the stage's."""
    settings = stage.settings.model_copy(update={"shutdown_timeout": 0.2, **files})
    async with open_gateway(settings) as gateway:
        yield gateway


def trusting(authority: Path, client: Path | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority)
    if client is not None:
        context.load_cert_chain(client)
    return context


async def models(gateway: Gateway, tls: ssl.SSLContext) -> Any:
    async with httpx.AsyncClient(base_url=gateway.url, verify=tls) as client:
        return [model["id"] for model in (await client.get("/v1/models")).json()["data"]]


async def listed(gateway: Gateway, tls: ssl.SSLContext) -> Any:
    """The models; None where there is no place for a connection."""
    with contextlib.suppress(httpx.TransportError):
        return await models(gateway, tls)
    return None


async def grpc_health(gateway: Gateway, *credentials: bytes) -> int:
    """The status that health tells over a secure channel: (authority, key, chain)."""
    secure = grpc.ssl_channel_credentials(*credentials)
    async with grpc.aio.secure_channel(gateway.grpc_address, secure) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
        return int(answer.status)


async def test_rest_and_grpc_use_tls(stage: Stage, certificates: Certificates) -> None:
    async with opened(stage, ssl_certfile=certificates.server) as gateway:
        assert gateway.url.startswith("https://")
        tls = trusting(certificates.authority)
        assert await models(gateway, tls) == [MODEL]
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await models(gateway, trusting(certificates.stranger))
        assert await grpc_health(gateway, certificates.authority.read_bytes()) == 1
        with pytest.raises(grpc.aio.AioRpcError):
            await grpc_health(gateway, certificates.stranger.read_bytes())
        with pytest.raises(httpx.HTTPError):  # in the clear
            async with httpx.AsyncClient() as client:
                await client.get(gateway.url.replace("https", "http") + "/v1/models")


@contextlib.asynccontextmanager
async def silent(gateway: Gateway, sent: bytes = b"") -> AsyncIterator[asyncio.StreamReader]:
    """A TCP connection to the TLS port that sends no more than this."""
    port = int(gateway.url.rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        yield reader
    finally:
        writer.close()


async def test_connections_count_before_their_handshake(
    stage: Stage, certificates: Certificates
) -> None:
    limits = {"max_connections": 40, "ssl_certfile": certificates.server}
    tls = trusting(certificates.authority)
    async with opened(stage, **limits) as gateway, contextlib.AsyncExitStack() as stack:
        # Half of them have begun a handshake, with a record that never ends.
        for number in range(40):
            await stack.enter_async_context(silent(gateway, b"\x16\x03\x01" * (number % 2)))
        async with asyncio.timeout(60):
            for _ in range(20):
                async with silent(gateway) as refused:
                    with contextlib.suppress(ConnectionError):
                        assert await refused.read() == b""
        with pytest.raises(httpx.TransportError):
            await models(gateway, tls)
        await stack.aclose()
        async with asyncio.timeout(60):  # until they have left
            while (found := await listed(gateway, tls)) is None:
                await asyncio.sleep(0.05)
        assert found == [MODEL]


async def test_a_handshake_is_part_of_the_time_for_a_head(
    stage: Stage, certificates: Certificates
) -> None:
    limits = {"request_header_timeout": 1.0, "ssl_certfile": certificates.server}
    tls = trusting(certificates.authority)
    async with opened(stage, **limits) as gateway, asyncio.timeout(60):
        for sent in (b"", b"\x16", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc"):
            async with silent(gateway, sent) as reader:
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
        # The same for one that says nothing behind its handshake.
        port = int(gateway.url.rsplit(":", 1)[1])
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=tls, server_hostname="localhost"
        )
        assert await reader.read() == b""
        writer.close()
        assert await models(gateway, tls) == [MODEL]


async def test_our_clients_trust_the_given_authority(
    stage: Stage, certificates: Certificates
) -> None:
    files = {"ssl_certfile": certificates.server, "ssl_keyfile": certificates.key}
    async with opened(stage, **files) as gateway:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
        client = Client([gateway.url], tls=trusting(certificates.authority))
        said = [
            choice["delta"].get("content") or ""
            async for event in client.stream("/v1/chat/completions", body)
            for choice in event.data["choices"]
        ]
        client.close()
        assert "".join(said) == ANSWER
        stranger = HttpClient(gateway.url, tls=trusting(certificates.stranger))
        with pytest.raises(HttpError, match=r"is not trusted .*--ssl-ca-certs"):
            await stranger.get("/v1/models")
        found = await asyncio.to_thread(healthcheck.check, f"{gateway.url}/health/live")
        assert found == "ready"


async def test_client_certificates_are_asked_for(stage: Stage, certificates: Certificates) -> None:
    files = {
        "ssl_certfile": certificates.server,
        "ssl_ca_certs": certificates.authority,
        "ssl_cert_reqs": 2,
    }
    authority, own = certificates.authority.read_bytes(), certificates.client.read_bytes()
    async with opened(stage, **files) as gateway:
        tls = trusting(certificates.authority, certificates.client)
        assert await models(gateway, tls) == [MODEL]
        with pytest.raises(httpx.HTTPError):
            await models(gateway, trusting(certificates.authority))
        assert await grpc_health(gateway, authority, own, own) == 1
        with pytest.raises(grpc.aio.AioRpcError):
            await grpc_health(gateway, authority)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"ssl_certfile": "nowhere.pem"}, "--ssl-certfile: nowhere.pem .*No such file"),
        ({"ssl_certfile": "ca.pem"}, "--ssl-certfile: .*ca.pem"),
        ({"ssl_certfile": "client.pem", "ssl_keyfile": "key.pem"}, "(?i)mismatch"),
        ({"ssl_keyfile": "key.pem"}, "--ssl-keyfile: needs --ssl-certfile"),
        ({"ssl_certfile": "server.pem", "ssl_cert_reqs": 2}, "needs --ssl-ca-certs"),
        ({"ssl_certfile": "server.pem", "ssl_ca_certs": "key.pem"}, "--ssl-ca-certs: "),
    ],
)
def test_files_that_do_not_go_together_are_refused(
    flags: dict[str, Any],
    said: str,
    certificates: Certificates,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(certificates.server.parent)
    given: dict[str, Any] = {
        name: Path(v) if isinstance(v, str) else v for name, v in flags.items()
    }
    with pytest.raises(InvalidRequest, match=said):
        ServerTls.of(GatewaySettings(**given))
