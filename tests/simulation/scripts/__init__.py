"""Python twins of the Lua scripts, a file for each, line for line, on `RedisModel`.

A twin's module has `run(lua)`. What it returns goes over the wire as the Lua value would. `None` is Lua's false, and an
empty string is as true here as there: conditions ask `is None`.
"""

import hashlib
import importlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

from shared.queue.scripts import __file__ as _lua_package
from shared.queue.scripts import source
from tests.simulation.redis_model import RedisError, RedisModel, Reply
from tests.simulation.scripts.prelude import Prelude

Run = Callable[[RedisModel, list[str], list[str]], Reply]

NAMES = sorted(
    path.stem
    for path in Path(_lua_package).parent.glob("*.lua")
    if path.stem not in ("prelude", "waiting")
)
# A test may put a faulty twin in a place; see `planted.py`.
replaced: dict[str, Callable[[Prelude], Reply]] = {}


@cache
def _named() -> dict[str, str]:
    return {_digest(source(name)): name for name in NAMES}


def _digest(script: str) -> str:
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()


@cache
def _twin(name: str) -> Callable[[Prelude], Reply]:
    run: Callable[[Prelude], Reply] = importlib.import_module(
        f"tests.simulation.scripts.{name}"
    ).run
    return run


def run_twin(name: str, model: RedisModel, keys: list[str], arguments: list[str]) -> Reply:
    """Runs the twin of a script."""
    return (replaced.get(name) or _twin(name))(Prelude(model, keys, arguments))


def twin_of(script: str) -> tuple[str, Run, str]:
    """Name, twin and digest of a script, given as its digest or its text."""
    digest = script if len(script) == 40 else _digest(script.encode("latin-1").decode())
    name = _named().get(digest)
    if name is None:
        raise RedisError("NOSCRIPT No matching script. Please use EVAL.")
    return name, lambda model, keys, arguments: run_twin(name, model, keys, arguments), digest
