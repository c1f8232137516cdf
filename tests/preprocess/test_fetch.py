"""Media come from the public internet and from nowhere else, however the address is written."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.preprocess_room import RoomMaker, file_of, image_at, picture, turn

from services.preprocess.address_policy import is_public
from services.preprocess.media_fetch import FetchPolicy, MediaFetcher
from shared.errors import InvalidRequest
from shared.media_store import media_digest

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
    settings = {"timeout_s": 5.0, "allow_private": True, **changes}
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
    assert not is_public("fe80::1%eth0")


async def test_a_name_that_turns_private_is_dialled_where_it_was_checked(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    answers = iter(["127.0.0.1", "93.184.216.34"])

    async def resolve(host: str, port: int, **_: object) -> list[object]:
        address = next(answers)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    monkeypatch.setattr(loop, "getaddrinfo", resolve)
    async with MediaFetcher(private()) as fetcher:
        assert await fetcher.fetch(f"http://rebind.example:{site.port}/a.png", 1 << 20) == PNG
    assert next(answers) == "93.184.216.34"  # it was asked once


async def test_one_private_address_among_several_is_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def resolve(host: str, port: int, **_: object) -> list[object]:
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
            for address in ("93.184.216.34", "10.0.0.1")
        ]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
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


async def test_a_name_that_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolve(host: str, port: int, **_: object) -> list[object]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    assert await refused(private(), "http://no-such-name.invalid/") == "MEDIA_FETCH_FAILED"


async def test_redirects_are_checked_like_addresses(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first host is held for public; it redirects to one that is not.
    monkeypatch.setattr(
        "services.preprocess.media_fetch.is_public", lambda address: address == "127.0.0.1"
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


async def test_the_room_fetches_by_its_policy(
    site: Site, clip_folder: Path, make_room: RoomMaker
) -> None:
    url = f"http://127.0.0.1:{site.port}/a.png"
    async with make_room(clip_folder, "closed") as room:
        with pytest.raises(InvalidRequest) as caught:
            await room.chat(turn("user", image_at(url, "the field")))
        assert caught.value.reason == "MEDIA_ADDRESS"
        assert caught.value.metadata["field"] == "the field"
    async with make_room(clip_folder, "open", allow_private_media=True) as room:
        response = await room.chat(turn("user", image_at(url)))
        assert response.media[0].source_digest == media_digest(PNG)
        with pytest.raises(InvalidRequest):
            await room.chat(turn("user", image_at(f"http://127.0.0.1:{site.port}/x")))
