"""The embedded Redis keeps what it was told, whatever ends it."""

from pathlib import Path

import psutil
import pytest
import redis

from services.launcher.redis.binary import WHEEL, find_redis_server
from services.launcher.redis.embedded_redis import EmbeddedRedis
from shared.errors import Unavailable


def test_it_is_configured_as_a_queue(private_redis: EmbeddedRedis) -> None:
    with redis.Redis.from_url(private_redis.url, decode_responses=True) as client:
        settings = client.config_get("*")
    assert settings["maxmemory-policy"] == "noeviction"
    assert settings["appendonly"] == "yes"
    assert settings["appendfsync"] == "everysec"
    assert settings["save"] == ""
    assert settings["port"] == "0"


def test_its_files_are_its_owners_alone(private_redis: EmbeddedRedis) -> None:
    with redis.Redis.from_url(private_redis.url) as client:
        client.set("request", "what a user asked")
    files = [path for path in private_redis.folder.rglob("appendonly*") if path.is_file()]
    assert files
    assert {path.stat().st_mode & 0o077 for path in files} == {0}


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_what_was_acknowledged_is_there_after_a_restart(
    private_redis: EmbeddedRedis, end: str
) -> None:
    with redis.Redis.from_url(private_redis.url) as client:
        client.set("request", "accepted")
    pid = private_redis.pid
    getattr(private_redis, end)()
    assert not psutil.pid_exists(pid)
    private_redis.start()
    with redis.Redis.from_url(private_redis.url) as client:
        assert client.get("request") == b"accepted"


def test_a_server_that_cannot_start_says_why(short_tmp: Path) -> None:
    folder = short_tmp / "state"
    folder.mkdir()
    (folder / "appendonly.aof").write_text("this is no append-only file")
    (folder / "appendonlydir").write_text("nor is this a folder")
    with pytest.raises(Unavailable, match=r"did not start: .*\w"):
        EmbeddedRedis(folder, short_tmp / "r.sock").start(timeout_s=5)


def test_a_socket_path_that_the_kernel_would_cut_is_refused(short_tmp: Path) -> None:
    with pytest.raises(Unavailable, match="over 99 bytes"):
        EmbeddedRedis(short_tmp, short_tmp / ("x" * 100))


def test_the_binary_tells_its_release() -> None:
    binary = find_redis_server()
    assert binary.found_in in ("PATH", WHEEL)
    release = binary.release()
    assert release is not None
    assert release.name in ("Redis", "Valkey")
    assert release.version.count(".") == 2


def test_the_file_that_redis_6_left_is_loaded(short_tmp: Path) -> None:
    (short_tmp / "appendonly.aof").write_bytes(
        b"*2\r\n$6\r\nSELECT\r\n$1\r\n0\r\n*3\r\n$3\r\nSET\r\n$7\r\nrequest\r\n$8\r\naccepted\r\n"
    )
    with (
        EmbeddedRedis(short_tmp, short_tmp / "r.sock") as server,
        redis.Redis.from_url(server.url) as client,
    ):
        assert client.get("request") == b"accepted"


@pytest.mark.parametrize("found_first", ["Redis server v=6.0.16", "Redis server v=7.0.15"])
def test_a_server_that_cannot_load_the_file_is_passed_over(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch, found_first: str
) -> None:
    """Such as a Redis that came onto the machine after the Valkey of the wheel had begun."""
    monkeypatch.setenv("PATH", str(short_tmp))
    with EmbeddedRedis(short_tmp / "state", short_tmp / "r.sock"):
        pass
    on_path = short_tmp / "redis-server"
    on_path.write_text(f"#!/bin/sh\necho '{found_first} sha=00000000:0 bits=64'\n")
    on_path.chmod(0o755)
    assert find_redis_server(short_tmp / "new").path == on_path
    assert find_redis_server(short_tmp / "state").found_in == WHEEL


def test_a_file_that_no_server_here_can_load_is_refused(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    server = EmbeddedRedis(short_tmp / "state", short_tmp / "r.sock")
    with server:
        pass
    (base,) = (short_tmp / "state").glob("appendonlydir/*.base.rdb")
    base.write_bytes(b"REDIS0012" + base.read_bytes()[9:])  # of Redis 7.4
    with pytest.raises(Unavailable, match="put that server on PATH, or"):
        server.start()


def test_each_test_starts_with_an_empty_redis(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        assert client.dbsize() == 0
        client.set("left", "over")


async def test_it_is_empty_for_the_next_one_too(redis_url: str) -> None:
    client = redis.asyncio.Redis.from_url(redis_url)
    try:
        assert await client.dbsize() == 0
    finally:
        await client.aclose()
