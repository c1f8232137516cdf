"""Lua scripts on the Redis model: the text that Redis gets, run by Lua 5.1 with Redis's conversions of values.

Source: "Redis Lua API reference" (redis.io), "Data type conversion".
"""

import functools
import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lupa.lua51 import LuaError, LuaRuntime, lua_type

from shared.queue import scripts
from shared.queue.scripts import source
from tests.simulation.redis.model import RedisError, RedisModel, Reply, Status

_INCLUDED = ("prelude", "waiting", "wait_estimate", "stored")  # what stands before others

# Lua's side of `redis.call`: an array comes from Python as `true` and its values. As in Redis, a script may neither
# read a global variable that is not there nor make one.
_PREPARE = b"""
local execute = ...
local function reply(first, ...)
  if first == true then return {...} end
  return first
end
redis = {call = function(...) return reply(execute(...)) end}
KEYS, ARGV = {}, {}
python, io, os, require, dofile, loadfile, package = nil, nil, nil, nil, nil, nil, nil
local globals = {}
setmetatable(_G, {__index = function(_, name) error('no global variable ' .. tostring(name)) end,
  __newindex = function(_, name) error('a script makes the global variable ' .. name) end})
return function(script, keys, arguments)
  KEYS, ARGV = keys, arguments
  return script()
end
"""


class _Interpreter:
    """One Lua for the process: `model` is the database that scripts see while they run."""

    def __init__(self) -> None:
        self.model: RedisModel
        self._lua = LuaRuntime(
            encoding=None,
            unpack_returned_tuples=True,
            register_eval=False,
            register_builtins=False,
        )
        self._run: Callable[..., Any] = self._lua.execute(_PREPARE, self._execute)
        self.compile: Callable[[bytes], Any] = functools.cache(self._lua.compile)

    def run(self, script: bytes, keys: list[bytes], arguments: list[bytes]) -> Reply:
        table = self._lua.table_from
        try:
            return _reply(self._run(self.compile(script), table(keys), table(arguments)))
        except LuaError as error:
            raise RedisError(f"ERR {error}") from error

    def _execute(self, command: bytes, *words: bytes | int | float) -> Any:
        """`redis.call`: Python's answer for Lua."""
        method = self.model.command(command)
        answer = method(*[word if isinstance(word, bytes) else _argument(word) for word in words])
        if answer is None:
            return False
        if isinstance(answer, list):
            return True, *[False if value is None else value for value in answer]
        if isinstance(answer, Status):
            return self._lua.table_from({b"ok": bytes(answer)})
        return answer


# What a test has run instead of a script, by its name; see `planted.py`.
replaced: dict[str, bytes] = {}
_interpreter = functools.cache(_Interpreter)


def run_script(
    model: RedisModel, script: bytes, keys: list[bytes], arguments: list[bytes]
) -> Reply:
    """Runs a script's text on a database. Raises RedisError."""
    interpreter = _interpreter()
    interpreter.model = model
    return interpreter.run(script, keys, arguments)


@functools.cache
def script_names() -> dict[bytes, str]:
    """Digest -> name of every script of the queue."""
    names = [path.stem for path in Path(scripts.__file__).parent.rglob("*.lua")]
    return {digest_of(source(name).encode()): name for name in names if name not in _INCLUDED}


@functools.cache
def digest_of(script: bytes) -> bytes:
    """The name under which EVALSHA knows a script."""
    return hashlib.sha1(script, usedforsecurity=False).hexdigest().encode()


def _argument(number: int | float) -> bytes:
    """A number of Lua as an argument of a command: `%.17g`."""
    return b"%d" % number if isinstance(number, int) else b"%.17g" % number


def _reply(value: Any) -> Reply:
    """What a script returns as a reply: numbers lose their fraction, an array ends at its first nil."""
    if value is None or value is False:
        return None
    if isinstance(value, int | float):
        return math.trunc(value)
    if lua_type(value) != "table":
        return value
    if value[b"ok"] is not None:
        return Status(value[b"ok"])
    return [_reply(item) for item in _array(value)]


def _array(table: Any) -> list[Any]:
    values: list[Any] = []
    while (value := table[len(values) + 1]) is not None:
        values.append(value)
    return values
