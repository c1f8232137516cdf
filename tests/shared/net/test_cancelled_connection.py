"""Who is cancelled while it connects to Redis ends, also where the client library forgets the cancellation."""

import asyncio

from redis.asyncio import Redis

from shared.net.redis.connection import Subscription
from shared.queue import connect

_STEPS = 80  # of the event loop: more than connecting takes


async def test_a_subscription_can_be_cancelled_at_any_time(redis_url: str) -> None:
    async def follow(redis: Redis) -> None:
        subscription = Subscription(redis, "channel")
        try:
            await subscription.open()
            await subscription.messages()
        finally:
            await subscription.give_back()

    for steps in range(_STEPS):
        async with connect(redis_url) as redis:
            following = asyncio.create_task(follow(redis))
            for _ in range(steps):
                await asyncio.sleep(0)
            following.cancel()
            await asyncio.wait([following], timeout=60)
            assert following.cancelled(), f"after {steps} steps"
