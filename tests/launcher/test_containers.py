"""What containers need of a service: a health check, and an address at which others reach it."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from shared.errors import Unavailable
from shared.net import healthcheck, internal_token
from shared.net.backoff import Backoff
from shared.net.own_address import address_toward
from shared.net.rpc.server import RpcServer


async def test_a_service_is_ready_once_it_says_so() -> None:
    async with RpcServer("127.0.0.1:0") as server:
        assert await asyncio.to_thread(healthcheck.check, server.address) == "NOT_SERVING"
        await server.ready()
        assert await asyncio.to_thread(healthcheck.check, server.address) == "ready"
        await server.not_ready()
        assert await asyncio.to_thread(healthcheck.check, server.address) == "NOT_SERVING"
    assert await asyncio.to_thread(healthcheck.check, server.address) != "ready"


@pytest.fixture
def token(tmp_path: Path) -> Iterator[None]:
    file = tmp_path / "token"
    file.write_text("between us\n")
    file.chmod(0o600)
    internal_token.use(file)
    yield
    internal_token.use(None)


def own_addresses() -> list[str]:
    """This machine's addresses, as URLs have them, that can be bound: loopback at least."""
    found = []
    for family, brackets in ((socket.AF_INET, "{}"), (socket.AF_INET6, "[{}]")):
        for addresses in psutil.net_if_addrs().values():
            for one in addresses:
                if one.family != family or one.address.startswith("fe80:"):
                    continue
                with contextlib.suppress(OSError), socket.socket(family) as probe:
                    probe.bind((one.address, 0))
                    found.append(brackets.format(one.address))
    return found


@pytest.mark.usefixtures("token")
async def test_a_service_that_listens_everywhere_advertises_where_it_is_reached() -> None:
    own = own_addresses()
    for listen in ("0.0.0.0:0", "[::]:0"):
        for address in own:  # Redis is where the route to it begins
            async with RpcServer(listen, redis_url=f"redis://:secret@{address}:6379/0") as server:
                assert server.address.rpartition(":")[0] == address
                await server.ready()
                assert await asyncio.to_thread(healthcheck.check, server.address) == "ready"


@pytest.mark.usefixtures("token")
@pytest.mark.parametrize(
    "redis_url", ["redis://127.0.0.1:6379/0", "redis://localhost/0", "unix:///run/redis.sock?db=0"]
)
async def test_a_service_beside_redis_advertises_loopback(redis_url: str) -> None:
    async with RpcServer("0.0.0.0:0", redis_url=redis_url) as server:
        assert server.address.rpartition(":")[0] in ("127.0.0.1", "[::1]")
        await server.ready()
        assert await asyncio.to_thread(healthcheck.check, server.address) == "ready"


async def test_without_a_route_to_redis_it_says_what_to_give() -> None:
    with pytest.raises(Unavailable, match=r"--advertise HOST:PORT") as failed:
        await address_toward("redis://:secret@nobody.invalid:6379/0", Backoff(0, 0))
    assert "nobody.invalid" in failed.value.message and "secret" not in failed.value.message


@pytest.mark.usefixtures("token")
async def test_what_is_advertised_can_be_given() -> None:
    async with RpcServer("0.0.0.0:0", advertise="decoder-7.example:50051") as server:
        assert server.address == "decoder-7.example:50051"


class Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/ready" else 503)
        self.end_headers()
        self.wfile.write(b"no decoder running")

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def page() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_page_is_ready_when_it_answers_200(
    page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert healthcheck.check(f"{page}/ready") == "ready"
    monkeypatch.setattr("sys.argv", ["healthcheck", f"{page}/broken"])
    with pytest.raises(SystemExit) as ended:
        healthcheck.main()
    assert ended.value.code == 1
    assert "no decoder running" in capsys.readouterr().out


def test_nobody_there_is_not_ready() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        assert healthcheck.check(f"http://127.0.0.1:{port}/ready") != "ready"
        assert healthcheck.check(f"127.0.0.1:{port}") != "ready"
