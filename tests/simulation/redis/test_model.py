"""The same Lua on a real Redis and on the model of it: whatever is called in whatever order, equal answers, equal
messages and equal databases.
"""

import random
from typing import Any

import hiredis
import pytest
import redis

from shared.queue.scripts import source
from tests.simulation.redis.drawn_calls import PREFIX, Call, Draw
from tests.simulation.redis.model import RedisModel, Reply
from tests.simulation.redis.scripts import run_script, script_names
from tests.simulation.redis.server import resp

_CALLS = 40
_PREFIX = PREFIX.encode()


class Both:
    """The same call to both."""

    def __init__(self, client: Any, run_id: str) -> None:
        self.client = client
        self.now_us = 0
        self.model = RedisModel(lambda: self.now_us)
        self.model.run_id = run_id
        self.published: list[tuple[bytes, bytes]] = []
        self.model.published = lambda channel, message: self.published.append((channel, message))
        client.set("sim:info", f"# Server\r\nrun_id:{run_id}\r\n")
        self.subscription = client.pubsub(ignore_subscribe_messages=True)
        self.subscription.subscribe(_PREFIX + b":tok", _PREFIX + b":ctl")
        for _ in range(2):
            self.subscription.parse_response(timeout=60)

    def call(self, call: Call, now_us: int) -> tuple[Reply, Reply]:
        """What the real one answers, and what the model does, as they go over the wire."""
        name, words = call[0], [word.encode("latin-1") for word in call[1]]
        self.now_us = now_us
        self.client.mset({"sim:s": now_us // 1_000_000, "sim:us": now_us % 1_000_000})
        if name.isupper():
            answer = self.client.execute_command(name, *words)
            return int(answer), _over_the_wire(self.model.call(name.encode(), *words))
        text = source(name)
        real = self.client.register_script(_with_our_clock(text))(keys=[_PREFIX], args=words)
        return real, _over_the_wire(run_script(self.model, text.encode(), [_PREFIX], words))

    def databases(self) -> tuple[dict[bytes, Any], dict[bytes, Any]]:
        """All keys of both, and which of them expire."""
        keys = sorted(key for key in self.client.keys("*") if not key.startswith(b"sim:"))
        there = {key: (self._read(key), self.client.pttl(key) >= 0) for key in keys}
        expires = self.model.expires
        here = {key: (value, key in expires) for key, value in self.model.dump().items()}
        return there, here

    def messages(self) -> list[tuple[bytes, bytes]]:
        """What the real one has published."""
        found = []
        for _ in self.published:
            _, channel, data = self.subscription.parse_response(timeout=60)
            found.append((channel, data))
        assert self.subscription.parse_response(block=False) is None
        return found

    def _read(self, key: bytes) -> Any:
        match self.client.type(key):
            case b"hash":
                return self.client.hgetall(key)
            case b"zset":
                return dict(self.client.zrange(key, 0, -1, withscores=True))
            case b"set":
                return sorted(self.client.smembers(key))
        return self.client.get(key)


def _with_our_clock(script: str) -> str:
    clock = "{redis.call('GET', 'sim:s'), redis.call('GET', 'sim:us')}"
    return script.replace("redis.call('TIME')", clock).replace(
        "redis.call('INFO', 'server')", "redis.call('GET', 'sim:info')"
    )


def _over_the_wire(reply: Reply) -> Any:
    reader = hiredis.Reader()
    reader.feed(resp(reply))
    answer = reader.gets()
    return 1 if answer == b"OK" else answer


def test_every_script_is_drawn() -> None:
    draw = Draw(random.Random(0))
    drawn = {draw.next()[0] for _ in range(2000)}
    assert {name for name in drawn if not name.isupper()} == set(script_names().values())


@pytest.mark.parametrize("seed", range(12))
def test_the_model_does_what_redis_does(redis_url: str, seed: int) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
        both = Both(client, f"cafe{seed % 3}")
        draw = Draw(random.Random(seed))
        for step in range(_CALLS):
            call = draw.next()
            real, model = both.call(call, draw.now_us)
            assert real == model, (step, call)
            there, here = both.databases()
            assert there == here, (step, call)
        assert both.messages() == both.published
        both.subscription.close()
