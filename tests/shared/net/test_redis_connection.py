"""The shared connection to Redis: order, refusals, and breaks."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from services.launcher.redis.embedded_redis import EmbeddedRedis
from shared.errors import Unavailable
from shared.net.redis.connection import (
    ErrorReply,
    RedisConnection,
    Subscription,
    connection_of,
)
from shared.queue import connect
from shared.queue.keys import Keys
from shared.queue.scripts import Scripts


@pytest.fixture
async def redis(private_redis: EmbeddedRedis) -> AsyncIterator[Redis]:
    client = connect(private_redis.url)
    yield client
    await client.aclose()


async def test_each_call_gets_its_own_answer(redis: Redis) -> None:
    line = connection_of(redis)
    assert connection_of(redis) is line
    await asyncio.gather(*(line.call("SET", f"k{i}", i) for i in range(200)))
    leaving = [asyncio.create_task(line.call("GET", f"k{i}")) for i in range(10)]
    await asyncio.sleep(0)
    leaving[3].cancel()
    values = await asyncio.gather(*(line.call("GET", f"k{i}") for i in range(200)))
    assert [int(value) for value in values] == list(range(200))
    done = await asyncio.gather(*leaving, return_exceptions=True)
    assert isinstance(done.pop(3), asyncio.CancelledError)
    assert done == [b"%d" % i for i in range(10) if i != 3]
    assert await line.call_all([("GET", "k7"), ("LLEN", "nothing")]) == [b"7", 0]


async def test_a_refused_command_does_not_affect_others(redis: Redis) -> None:
    line = connection_of(redis)
    await line.call("SET", "k", "text")
    with pytest.raises(ErrorReply, match="WRONGTYPE"):
        await line.call("LLEN", "k")
    answers = await line.call_all([("GET", "k"), ("LLEN", "k"), ("GET", "k")])
    assert answers[0] == answers[2] == b"text"
    assert "WRONGTYPE" in str(answers[1])


async def test_scripts_are_loaded_again_when_redis_has_forgotten_them(redis: Redis) -> None:
    scripts = Scripts(redis, Keys("m").prefix)
    assert await scripts.call("members", "decoder") == []
    await redis.script_flush()
    assert await scripts.call("members", "decoder") == []


async def test_the_connection_is_made_again_after_a_restart(
    redis: Redis, private_redis: EmbeddedRedis
) -> None:
    line = connection_of(redis)
    await line.call("SET", "k", "before")
    private_redis.kill()
    with pytest.raises(Unavailable):
        await line.call("GET", "k")
    await asyncio.to_thread(private_redis.start)
    assert await asyncio.gather(*(line.call("GET", "k") for _ in range(5))) == 5 * [b"before"]


async def test_a_frozen_redis_counts_as_dead(redis: Redis, private_redis: EmbeddedRedis) -> None:
    line = RedisConnection(redis.connection_pool, silence_s=1.0)
    await line.call("SET", "k", "v")
    os.kill(private_redis.pid, signal.SIGSTOP)
    try:
        with pytest.raises(Unavailable):
            await line.call("GET", "k")
    finally:
        os.kill(private_redis.pid, signal.SIGCONT)
    assert await line.call("GET", "k") == b"v"


async def test_a_subscription_gets_messages_and_raises_on_a_break(
    redis: Redis, private_redis: EmbeddedRedis
) -> None:
    subscription = Subscription(redis, "channel")
    await subscription.open()
    received: list[bytes] = []
    async with asyncio.timeout(60):
        while await connection_of(redis).call("PUBLISH", "channel", "0") == 0:
            await asyncio.sleep(0.01)
        for number in range(1, 50):
            await connection_of(redis).call("PUBLISH", "channel", number)
        while len(received) < 50:
            received += await subscription.messages()
    assert received == [b"%d" % number for number in range(50)]
    private_redis.kill()
    with pytest.raises(Unavailable):
        await subscription.messages()
    await subscription.give_back()
