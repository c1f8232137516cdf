"""The Lua scripts on a real Redis and their Python twins: whatever is called in whatever order, equal answers and equal
databases.
"""

import random
from typing import Any

import pytest
import redis

from shared.queue.scripts import source
from tests.simulation.drawn_calls import PREFIX, Call, Draw
from tests.simulation.redis_model import RedisError, RedisModel, Reply
from tests.simulation.redis_room import resp
from tests.simulation.scripts import NAMES, run_twin

_INFO = "# Server\r\nrun_id:cafe{}\r\n"


class Both:
    """The same call to both."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.now_us = 0
        self.model = RedisModel(lambda: self.now_us)
        self.said: list[tuple[str, str]] = []
        self.model.published = lambda channel, message: self.said.append((channel, message))
        self.scripts = {
            name: client.register_script(_under_our_clock(source(name))) for name in NAMES
        }
        self.ear = client.pubsub(ignore_subscribe_messages=True)
        self.ear.subscribe(f"{PREFIX}:tok", f"{PREFIX}:ctl")
        for _ in range(2):
            self.ear.parse_response(timeout=5.0)

    def call(self, call: Call, now_us: int) -> tuple[Reply, Reply]:
        """What Lua answers, and what Python does, as they go over the wire."""
        name, words = call
        self.now_us = now_us
        self.client.mset({"sim:s": now_us // 1_000_000, "sim:us": now_us % 1_000_000})
        if name == "hold":
            key = f"{PREFIX}:recovery"
            for one in (self.client.execute_command, self.model.call):
                one(*(("SET", key, "x") if words == ["SET"] else ("DEL", key)))
            return None, None
        encoded = [word.encode("latin-1") for word in words]
        try:
            lua = self.scripts[name](keys=[PREFIX], args=encoded)
        except redis.ResponseError as error:
            raise AssertionError(f"{name} {words}: {error}") from error
        try:
            twin = run_twin(name, self.model, [PREFIX], words)
        except RedisError as error:
            raise AssertionError(f"{name} {words}: {error}") from error
        return _plain(lua), _plain(_over_the_wire(twin))

    def databases(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """All keys of both, and which of them expire."""
        keys = sorted(key.decode("latin-1") for key in self.client.keys("*"))
        there = {key: self._read(key) for key in keys if not key.startswith("sim:")}
        expiring = self.model.expires
        here = {
            key: (sorted(value) if isinstance(value, list) else value, key in expiring)
            for key, value in self.model.dump().items()
        }
        return there, here

    def heard(self) -> list[tuple[str, str]]:
        """What the real one has published."""
        found = []
        for _ in self.said:
            _, channel, data = self.ear.parse_response(timeout=5.0)
            found.append((channel.decode("latin-1"), data.decode("latin-1")))
        assert self.ear.parse_response(block=False) is None
        return found

    def _read(self, key: str) -> tuple[Any, bool]:
        client, name = self.client, key.encode("latin-1")
        expires = client.pttl(name) >= 0
        match client.type(name):
            case b"hash":
                value: Any = _plain(client.hgetall(name))
            case b"zset":
                value = {
                    m.decode("latin-1"): s for m, s in client.zrange(name, 0, -1, withscores=True)
                }
            case b"set":
                value = sorted(m.decode("latin-1") for m in client.smembers(name))
            case _:
                value = client.get(name).decode("latin-1")
        return value, expires


def _under_our_clock(script: str) -> str:
    clock = "{redis.call('GET', 'sim:s'), redis.call('GET', 'sim:us')}"
    return script.replace("redis.call('TIME')", clock).replace(
        "redis.call('INFO', 'server')", "redis.call('GET', 'sim:info')"
    )


def _over_the_wire(reply: Reply) -> Any:
    import hiredis

    reader = hiredis.Reader()
    reader.feed(resp(reply))
    return reader.gets()


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, dict):
        return {_plain(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value


def test_every_script_is_drawn() -> None:
    draw = Draw(random.Random(0))
    assert {draw.next()[0] for _ in range(2000)} == {*NAMES, "hold"}


@pytest.mark.parametrize("block", range(8))
def test_lua_and_python_do_the_same(redis_url: str, block: int) -> None:
    with redis.Redis.from_url(redis_url) as client:
        for seed in range(12 * block, 12 * block + 12):
            client.flushall()
            client.set("sim:info", _INFO.format(seed % 3))
            both = Both(client)
            both.model.run_id = f"cafe{seed % 3}"
            draw = Draw(random.Random(seed))
            history: list[Call] = []
            for step in range(60):
                history.append(draw.next())
                lua, twin = both.call(history[-1], draw.now_us)
                assert lua == twin, (seed, step, history[-1])
                if step % 10 == 9:
                    there, here = both.databases()
                    assert there == here, (seed, step, [name for name, _ in history[-10:]])
            assert sorted(both.heard()) == sorted(both.said), seed
            both.ear.close()
