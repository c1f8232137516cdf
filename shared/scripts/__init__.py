"""The Lua scripts that are the only writers of the queue, the registry and the token log; keys in `shared/keys.py`."""

from functools import cache
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.commands.core import AsyncScript
from redis.exceptions import RedisError

from shared.errors import Unavailable

_FOLDER = Path(__file__).parent


@cache
def source(name: str) -> str:
    """The text of one script with the prelude before it."""
    return "\n".join(
        (_FOLDER / file).read_text(encoding="utf-8") for file in ("prelude.lua", f"{name}.lua")
    )


class Scripts:
    """Calls scripts by their name: EVALSHA, with a reload when Redis has forgotten one."""

    def __init__(self, redis: Redis, prefix: str) -> None:
        self._redis = redis
        self._prefix = prefix
        self._scripts: dict[str, AsyncScript] = {}

    async def call(self, name: str, *arguments: str | bytes | int) -> Any:
        """Runs a script. Raises Unavailable when Redis is away or refuses to write."""
        script = self._scripts.get(name)
        if script is None:
            script = self._scripts[name] = self._redis.register_script(source(name))
        try:
            return await script(keys=[self._prefix], args=arguments)
        except RedisError as error:
            raise Unavailable("REDIS_UNAVAILABLE", f"Redis: {error}") from error
