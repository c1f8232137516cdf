"""Redis over TLS, with users and passwords in the URL: rediss:// through a TLS proxy before the real server, which is
built without TLS itself.
"""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

import pytest
from redis.asyncio import Redis

from services.launcher.redis import check as redis_check
from services.launcher.redis.embedded_redis import EmbeddedRedis
from shared.errors import Unavailable
from shared.net.redis.connection import Subscription, connection_of
from shared.queue import Queue, connect
from shared.queue.keys import Keys
from tests.support.network.certificates import Certificates, make_certificates

USER, PASSWORD = "tess:era", "p@ss/w:rd#%"
LARGE = b"x" * (3 << 20)  # many TLS records


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return make_certificates(tmp_path)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def tls_before(redis: EmbeddedRedis, tls: ssl.SSLContext) -> AsyncIterator[int]:
    """The port of a TLS server that passes everything on."""
    tasks = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner = await asyncio.open_unix_connection(str(redis.socket_path))
        for pair in ((reader, inner[1]), (inner[0], writer)):
            tasks.add(asyncio.create_task(_pump(*pair)))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
async def port(private_redis: EmbeddedRedis, certificates: Certificates) -> AsyncIterator[int]:
    """TLS before a server that has an ACL user and wants client certificates if one comes."""
    async with Redis.from_url(private_redis.url) as client:
        await client.acl_setuser(
            USER,
            enabled=True,
            passwords=[f"+{PASSWORD}"],
            keys=["*"],
            channels=["*"],
            categories=["+@all"],
        )
        await client.config_set("requirepass", PASSWORD)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificates.authority)
    tls.load_cert_chain(certificates.server)
    tls.verify_mode = ssl.CERT_OPTIONAL
    async with tls_before(private_redis, tls) as found:
        yield found


def url_of(port: int, ca: Path | None, user: str = USER, **query: str) -> str:
    """As redis-py reads it."""
    given = query if ca is None else {"ssl_ca_certs": str(ca), **query}
    words = "&".join(f"{name}={quote(value, safe='')}" for name, value in given.items())
    login = f"{quote(user, safe='')}:{quote(PASSWORD, safe='')}"
    return f"rediss://{login}@127.0.0.1:{port}/0?{words}"


@pytest.mark.parametrize("user", [USER, ""])
async def test_the_connection_and_a_subscription_use_tls(
    port: int, certificates: Certificates, user: str
) -> None:
    client = connect(url_of(port, certificates.authority, user))
    line = connection_of(client)
    await line.call("SET", "k", LARGE)
    assert await asyncio.gather(*(line.call("GET", "k") for _ in range(4))) == [LARGE] * 4
    assert await Queue(client, Keys("m")).depth() == (0, 0)
    subscription = Subscription(client, "channel")
    await subscription.open()
    async with asyncio.timeout(60):
        while await line.call("PUBLISH", "channel", LARGE) == 0:
            await asyncio.sleep(0.01)
        assert LARGE in await subscription.messages()
    await subscription.give_back()
    await client.aclose()


async def test_a_server_without_a_valid_certificate_is_refused(
    port: int, certificates: Certificates
) -> None:
    for url in (url_of(port, certificates.stranger), url_of(port, None)):
        client = connect(url)
        with pytest.raises(Unavailable, match=r"(?i)certificate"):
            await connection_of(client).call("PING")
        await client.aclose()
    client = connect(url_of(port, None, ssl_cert_reqs="none", ssl_check_hostname="false"))
    assert await connection_of(client).call("PING") == b"PONG"
    await client.aclose()


async def test_the_check_before_a_start_uses_tls(port: int, certificates: Certificates) -> None:
    await asyncio.to_thread(redis_check.require, url_of(port, certificates.authority))
    with pytest.raises(Unavailable, match="no Redis answers"):
        await asyncio.to_thread(redis_check.require, url_of(port, certificates.stranger))
