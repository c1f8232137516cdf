"""A Redis whose password is in a file."""

from pathlib import Path

import pytest
import redis

from services.launcher.redis import check as redis_check
from services.launcher.redis.embedded_redis import EmbeddedRedis
from shared.errors import InvalidRequest, Unavailable
from shared.net.redis.url import with_password, without_password
from shared.queue import connect

PASSWORD = "p@ss/w:rd#%"


async def test_the_password_of_a_file_is_used(private_redis: EmbeddedRedis, tmp_path: Path) -> None:
    with redis.Redis.from_url(private_redis.url) as client:
        client.config_set("requirepass", PASSWORD)
    file = tmp_path / "password"
    file.write_text(f"{PASSWORD}\n")
    url = with_password(private_redis.url, file)
    client = connect(url)
    assert await client.ping()
    await client.aclose()
    redis_check.require(url)

    with pytest.raises(Unavailable, match="no Redis answers"):
        redis_check.require(private_redis.url)
    file.write_text("wr#ng")
    with pytest.raises(Unavailable, match="no Redis answers") as refused:
        redis_check.require(with_password(private_redis.url, file))
    assert not any(secret in refused.value.message for secret in ("wr#ng", "wr%23ng"))
    assert "***@" in refused.value.message


def test_urls_keep_their_other_parts(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("x/y")
    assert with_password("rediss://me@h:1/2", file) == "rediss://me:x%2Fy@h:1/2"
    assert with_password("redis://h/0", None) == "redis://h/0"
    assert without_password("redis://me:x@h:1/2?a=b") == "redis://***@h:1/2?a=b"
    assert without_password("unix:///a.sock?db=1&password=x") == "unix:///a.sock?db=1"
    with pytest.raises(InvalidRequest, match="leave one of them out"):
        with_password("redis://:z@h/0", file)
