"""Whether a Redis can be the queue: it answers, evicts nothing, and keeps an append-only file."""

from collections.abc import Mapping
from dataclasses import dataclass

import redis

from shared.errors import Unavailable
from shared.net.redis.url import without_password

_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class RedisReport:
    """What a Redis reports of itself; None where it forbids the question.

    version: such as "7.4.1", or "Valkey 9.1.2".
    """

    version: str
    eviction: str | None
    append_only: str | None

    @property
    def faults(self) -> list[tuple[str, str]]:
        """(what is wrong, the command that corrects it) for each setting under which requests can be lost."""
        found = []
        if self.eviction not in (None, "noeviction"):
            found.append(
                (
                    f"maxmemory-policy is {self.eviction}: accepted requests may be thrown away",
                    "redis-cli CONFIG SET maxmemory-policy noeviction",
                )
            )
        if self.append_only not in (None, "yes"):
            found.append(
                (
                    f"appendonly is {self.append_only}: a restart of Redis loses what it holds",
                    "redis-cli CONFIG SET appendonly yes",
                )
            )
        return found


def report(url: str) -> RedisReport:
    """Asks the Redis at a redis:// or unix:// URL. Raises Unavailable if it does not answer."""
    try:
        with redis.Redis.from_url(
            url,
            decode_responses=True,
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
        ) as client:
            return RedisReport(
                _version(client.info("server")),
                _setting(client, "maxmemory-policy"),
                _setting(client, "appendonly"),
            )
    except (redis.RedisError, ValueError, OSError) as error:
        raise Unavailable(
            "REDIS_AWAY", f"no Redis answers at {without_password(url)}: {error}"
        ) from error


def require(url: str) -> None:
    """Raises Unavailable if no Redis answers there."""
    report(url)


def _version(server: Mapping[str, object]) -> str:
    # Valkey's `redis_version` is that of the Redis that it stands in for.
    own = server.get("valkey_version")
    return str(server["redis_version"]) if own is None else f"Valkey {own}"


def _setting(client: redis.Redis, name: str) -> str | None:
    try:
        return str(client.config_get(name)[name])
    except (redis.ResponseError, KeyError):  # hosted ones forbid CONFIG
        return None
