"""Media are fetched from the public internet alone, however the address is written."""

import asyncio
import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.preprocess.download.address_policy import is_public
from services.preprocess.download.fetcher import FetchPolicy, MediaFetcher
from shared.errors import InvalidRequest
from shared.queue.stores.media_store import media_digest
from tests.support.preprocess.service import (
    PreprocessMaker,
    RunningPreprocess,
    file_of,
    image_at,
    picture,
    turn,
)

PNG = file_of(picture(60, 60))


class Site:
    """A web server of our own. `/to?<url>` redirects, `/again` for ever, `/slow` never answers, `/big` has no end."""

    def __init__(self) -> None:
        self.port = 0
        self.asked: list[str] = []

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split(" ")[1]
            self.asked.append(path)
            if path == "/slow":
                await reader.read()
            elif path == "/big":
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                while True:
                    writer.write(b"x" * 65536)
                    await writer.drain()
            elif path.startswith("/to?") or path == "/again":
                target = path.removeprefix("/to?")
                writer.write(
                    f"HTTP/1.1 302 Found\r\nLocation: {target}\r\nContent-Length: 0\r\n\r\n".encode()
                )
            elif path == "/a.png":
                writer.write(
                    f"HTTP/1.1 200 OK\r\nContent-Length: {len(PNG)}\r\n\r\n".encode() + PNG
                )
            else:
                writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            await writer.drain()
        writer.close()


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    server_site = Site()
    server = await asyncio.start_server(server_site.answer, "127.0.0.1", 0)
    server_site.port = server.sockets[0].getsockname()[1]
    yield server_site
    server.close()


def private(**changes: object) -> FetchPolicy:
    settings = {"timeout_s": 60.0, "allow_private": True, **changes}
    return FetchPolicy(**settings)  # type: ignore[arg-type]


async def refused(policy: FetchPolicy, url: str) -> str:
    async with MediaFetcher(policy) as fetcher:
        with pytest.raises(InvalidRequest) as caught:
            await fetcher.fetch(url, 1 << 20)
    return caught.value.reason


async def test_private_addresses_are_refused_in_every_spelling(site: Site) -> None:
    # Some of these are asked of a name server, which may be far or away.
    policy = private(allow_private=False, timeout_s=60.0)
    for host in (
        "127.0.0.1",
        "localhost",
        "[::1]",
        "0x7f000001",
        "2130706433",
        "0177.0.0.1",
        "127.1",
        "0.0.0.0",
        "[::]",
        "[::ffff:127.0.0.1]",
        "10.0.0.1",
        "169.254.169.254",
        "[fe80::1]",
        "[fd00:ec2::254]",
        "100.64.0.1",
        "224.0.0.1",
        "168.63.129.16",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
        "127.0.0.1.",
        "user:pass@127.0.0.1",
    ):
        reason = await refused(policy, f"http://{host}:{site.port}/a.png")
        assert reason in ("MEDIA_ADDRESS", "MEDIA_FETCH_FAILED"), host
    for url in (
        "file:///etc/passwd",
        "ftp://example.org/a",
        "gopher://x",
        "//x/y",
        "a.png",
        "http://",
    ):
        assert await refused(policy, url) in ("MEDIA_URL", "MEDIA_FETCH_FAILED"), url
    assert site.asked == []


def test_public_addresses_are_public() -> None:
    assert is_public("93.184.216.34")
    assert is_public("2606:4700::1111")
    assert is_public("::ffff:93.184.216.34") and is_public("64:ff9b::93.184.216.34")
    assert is_public("2606:4700::5eff:a00:1") and is_public("2606:4700:0:5efe::1")
    assert not is_public("fe80::1%eth0")


@pytest.mark.parametrize(
    "address",
    [
        "192.0.0.192",
        "192.0.0.9",
        "192.88.99.1",
        "198.18.0.1",
        "203.0.113.1",
        "240.0.0.1",
        "255.255.255.255",
        "64:ff9b:1::1",
        "64:ff9b:1::93.184.216.34",
        "64:ff9b::10.0.0.1",
        "64:ff9b::169.254.169.254",
        "fec0::1",
        "::8.8.8.8",
        "::ffff:192.0.0.192",
        "2002:a00:1::1",
        "2002:5db8:d822::1",
        "2606:4700::5efe:10.0.0.1",  # ISATAP
        "2606:4700::200:5efe:169.254.169.254",
        "2606:4700:1:2:0:5efe:93.184.216.34",
        "fe80::5efe:93.184.216.34",
        "::ffff:0:10.0.0.1",
        "::ffff:0:93.184.216.34",
        "2002:c000:c0::1",
        "2001:0:4136:e378:8000:63bf:3fff:fdd2",
        "2001:db8::1",
        "3fff::1",
        "ff0e::1",
        "fc00::1",
        "::",
    ],
)
def test_what_is_not_globally_routable_is_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "host", ["a" * 4000, ".".join(["abc"] * 100), "a" * 64 + ".example.org", "ü" * 4000]
)
async def test_an_invalid_host_name_is_not_looked_up(
    host: str, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *names, **_: looked_up.append(names))
    async with MediaFetcher(private()) as fetcher:
        for url in (f"http://{host}/a.png", f"http://127.0.0.1:{site.port}/to?http://{host}/"):
            with pytest.raises(InvalidRequest) as caught:
                if url.startswith("http://127"):
                    monkeypatch.undo()  # the first host is looked up
                await fetcher.fetch(url, 1 << 20)
            assert caught.value.reason in ("MEDIA_URL", "MEDIA_FETCH_FAILED")
            assert len(caught.value.message) < 400
    assert looked_up == []


async def test_slow_lookups_do_not_delay_others(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, real = threading.Event(), socket.getaddrinfo

    def resolve(host: str, *rest: object, **options: object) -> object:
        if host.endswith("slow.example"):
            answered.wait(300)
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        return real(host, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    async with MediaFetcher(private()) as fetcher:
        slow = [
            asyncio.create_task(fetcher.fetch(f"http://{n}.slow.example/", 1)) for n in range(100)
        ]
        await asyncio.sleep(0.1)
        here = f"http://127.0.0.1:{site.port}/a.png"
        assert await fetcher.fetch(here, 1 << 20) == PNG
        assert await asyncio.to_thread(len, PNG) == len(PNG)  # nor those who use other threads
        assert not any(task.done() for task in slow)
        answered.set()
        ends = await asyncio.gather(*slow, return_exceptions=True)
    assert {getattr(end, "reason", end) for end in ends} == {"MEDIA_FETCH_FAILED"}


class NamedSite:
    """A web server with TLS for several names at one address; it sets a cookie with every answer."""

    def __init__(self, folder: Path) -> None:
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
        files = ["-keyout", "key.pem", "-out", "cert.pem"]
        names = "subjectAltName=DNS:a.example,DNS:b.example"
        subprocess.run(
            [*command, *files, "-subj", "/CN=test", "-addext", names],
            cwd=folder,
            check=True,
            capture_output=True,
        )
        self.authority = str(folder / "cert.pem")
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.tls.load_cert_chain(folder / "cert.pem", folder / "key.pem")
        self.tls.set_servername_callback(self._named)
        self._name_of: dict[int, str | None] = {}
        self.seen: list[tuple[str | None, str, str]] = []  # TLS name, Host, Cookie
        self.connections = 0

    def _named(self, connection: Any, name: str | None, _: object) -> None:
        connection.tls_name = name

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        name = writer.get_extra_info("ssl_object").tls_name
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
                self.seen.append((name, headers["host"], headers.get("cookie", "")))
                writer.write(
                    b"HTTP/1.1 200 OK\r\nSet-Cookie: who=me; Path=/\r\nContent-Length: 2\r\n\r\nok"
                )
                await writer.drain()
        writer.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
async def test_names_at_one_address_share_neither_connections_nor_cookies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = NamedSite(tmp_path)
    server = await asyncio.start_server(named.answer, "127.0.0.1", 0, ssl=named.tls)
    port = server.sockets[0].getsockname()[1]

    def resolve(host: str, *_: object, **options: object) -> list[object]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    tls = ssl.create_default_context(cafile=named.authority)
    async with MediaFetcher(private(), tls) as fetcher:
        for name in ("a.example", "b.example", "a.example", "b.example"):
            assert await fetcher.fetch(f"https://{name}:{port}/", 100) == b"ok"
        with pytest.raises(
            InvalidRequest
        ):  # the certificate is not its own, whoever was asked before
            await fetcher.fetch(f"https://c.example:{port}/", 100)
    server.close()
    assert [tls_name for tls_name, _, _ in named.seen] == ["a.example", "b.example"] * 2
    assert all(host == f"{tls_name}:{port}" for tls_name, host, _ in named.seen)
    assert all(cookie == "" for _, _, cookie in named.seen)
    assert named.connections <= 3  # one for each name, and the one that was refused


async def test_http_clients_of_many_hosts_are_closed_least_recently_used_first(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(host: str, *_: object, **options: object) -> list[object]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", site.port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    async with MediaFetcher(private()) as fetcher:
        for number in range(80):
            url = f"http://h{number}.example:{site.port}/a.png"
            assert await fetcher.fetch(url, 1 << 20) == PNG
        assert len(fetcher._clients._entries) == 64


async def test_the_connection_goes_to_the_address_that_was_checked(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(["127.0.0.1", "93.184.216.34"])

    def resolve(host: str, port: int, **_: object) -> list[object]:
        address = next(answers)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    async with MediaFetcher(private()) as fetcher:
        assert await fetcher.fetch(f"http://rebind.example:{site.port}/a.png", 1 << 20) == PNG
    assert next(answers) == "93.184.216.34"  # it was asked once


async def test_one_private_address_among_several_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def resolve(host: str, port: int, **_: object) -> list[object]:
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
            for address in ("93.184.216.34", "10.0.0.1")
        ]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert await refused(private(allow_private=False), "http://both.example/") == "MEDIA_ADDRESS"


async def test_fetching_and_its_limits(site: Site) -> None:
    here = f"http://127.0.0.1:{site.port}"
    async with MediaFetcher(private()) as fetcher:
        assert await fetcher.fetch(f"{here}/a.png", 1 << 20) == PNG
        assert await fetcher.fetch(f"{here}/to?{here}/to?/a.png", 1 << 20) == PNG
    assert await refused(private(), f"{here}/missing") == "MEDIA_FETCH_FAILED"
    assert await refused(private(), f"{here}/again") == "MEDIA_FETCH_FAILED"
    assert await refused(private(), f"{here}/to?file:///etc/passwd") == "MEDIA_URL"
    assert await refused(private(), f"{here}/big") == "MEDIA_TOO_LARGE"
    assert await refused(private(timeout_s=0.2), f"{here}/slow") == "MEDIA_TIMEOUT"
    assert await refused(private(), "http://127.0.0.1:1/") == "MEDIA_FETCH_FAILED"


async def test_an_unknown_host_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(host: str, port: int, **_: object) -> list[object]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert await refused(private(), "http://no-such-name.invalid/") == "MEDIA_FETCH_FAILED"


async def test_redirects_are_checked_like_addresses(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first host is held for public; it redirects to one that is not.
    monkeypatch.setattr(
        "services.preprocess.download.fetcher.is_public", lambda address: address == "127.0.0.1"
    )
    policy = private(allow_private=False)
    here = f"http://127.0.0.1:{site.port}"
    assert await refused(policy, f"{here}/to?http://127.0.0.2:{site.port}/a.png") == "MEDIA_ADDRESS"
    assert len(site.asked) == 1


async def test_allowed_domains(site: Site) -> None:
    url = f"http://localhost:{site.port}/a.png"
    assert await refused(private(allowed_domains=("example.org",)), url) == "MEDIA_DOMAIN"
    async with MediaFetcher(private(allowed_domains=("example.org", "localhost"))) as fetcher:
        assert await fetcher.fetch(url, 1 << 20) == PNG
        with pytest.raises(InvalidRequest):
            await fetcher.fetch(f"http://127.0.0.1:{site.port}/a.png", 1 << 20)
    policy = private(allowed_domains=(".example.org",))
    assert policy.allows("a.example.org")
    assert not policy.allows("example.org.evil.com")
    assert not policy.allows("badexample.org")


async def test_the_service_fetches_by_its_policy(
    site: Site, clip_folder: Path, make_preprocess: PreprocessMaker
) -> None:
    url = f"http://127.0.0.1:{site.port}/a.png"
    async with make_preprocess(clip_folder, "open", allow_private_media=True) as service:
        response = await service.chat(turn("user", image_at(url)))
        assert response.media[0].source_digest == media_digest(PNG)
        with pytest.raises(InvalidRequest):
            await service.chat(turn("user", image_at(f"http://127.0.0.1:{site.port}/x")))


@pytest.mark.asyncio(loop_scope="module")
async def test_a_service_fetches_nothing_of_private_addresses_by_default(
    clip_service: RunningPreprocess,
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await clip_service.chat(turn("user", image_at("http://127.0.0.1:1/a.png", "the field")))
    assert caught.value.reason == "MEDIA_ADDRESS"
    assert caught.value.metadata["field"] == "the field"
