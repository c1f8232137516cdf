"""The Lua scripts that are the only writers of the queue, the registry and the token log; keys in `keys.py`.

`gateway/` and `scheduler/` hold those that one kind of service calls, `gateway/stores/` those about what is kept beside
the queue (`shared/queue/stores`); names are unique all the same.
"""

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from shared.errors import Unavailable
from shared.net.redis.connection import ErrorReply, connection_of

_FILES = {path.stem: path for path in Path(__file__).parent.rglob("*.lua")}


# Scripts that move requests in and out of the queue, or look at it, get `waiting.lua` as well, and the one that refuses
# what would wait too long `wait_estimate.lua`; the others, `append` above all, stay small without them.
_MOVES = frozenset(
    [
        "admit",
        "cancel",
        "reserve",
        "expire",
        "fence",
        "abandoned",
        "give_back",
        "leave",
        "queue_age",
        "restore",
        "sweep",
        "take",
    ]
)
_ESTIMATES = frozenset(["reserve"])
# Those about files and batches get `stored.lua`: what these have in common.
_STORED = ("file_", "batch_")


@cache
def source(name: str) -> str:
    """The text of one script, behind the functions that it shares with others."""
    shared = (
        ("prelude", True),
        ("waiting", name in _MOVES),
        ("wait_estimate", name in _ESTIMATES),
        ("stored", name.startswith(_STORED)),
    )
    parts = [part for part, is_needed in shared if is_needed] + [name]
    return "\n".join(_FILES[part].read_text(encoding="utf-8") for part in parts)


@cache
def _digest(name: str) -> str:
    return hashlib.sha1(source(name).encode(), usedforsecurity=False).hexdigest()


class Scripts:
    """Calls scripts by their name: EVALSHA, with a reload when Redis has forgotten one."""

    def __init__(self, redis: Redis, prefix: str, *, checks_run: bool = True) -> None:
        """`checks_run`: new connections find out first whether Redis has restarted and lost writes under the prefix."""
        self._connection = connection_of(redis)
        self._prefix = prefix
        if checks_run:
            self._connection.check_runs(prefix, source("check_run"))

    async def call(self, name: str, *arguments: str | bytes | int) -> Any:
        """Runs a script. Raises Unavailable when Redis is away or refuses to write."""
        try:
            try:
                return await self._call("EVALSHA", _digest(name), arguments)
            except ErrorReply as error:
                if not str(error).startswith("NOSCRIPT"):
                    raise
            return await self._call("EVAL", source(name), arguments)
        except ErrorReply as error:
            if "READONLY" in str(
                error
            ):  # it was the master once: the next connection finds the new one
                self._connection.abort()
            # The reason for a refused command follows the position in the script.
            why = str(error).rpartition(": -")[2]
            raise Unavailable("REDIS_UNAVAILABLE", f"Redis: {why}") from error

    async def _call(self, how: str, script: str, arguments: tuple[str | bytes | int, ...]) -> Any:
        return await self._connection.call(how, script, 1, self._prefix, *arguments)
