"""What a gateway reports to Redis of requests whose clients have left."""

import asyncio
from typing import Any

from services.gateway.admission.held_requests import HeldRequest, HeldRequests
from services.gateway.following.cancels import Cancels
from services.gateway.following.follower import Follower
from services.gateway.telemetry.metrics.metrics import Metrics
from shared.queue import TokenChannel
from tessera.scheduler.v1.queue_pb2 import RequestSpec
from tests.support.queue.client import QueueClient

PAUSE_MS = 3000


async def lives_until(client: QueueClient, rid: str) -> int:
    value: Any = await client.redis.hget(client.keys.request(rid), "follow_until_ms")
    return int(value)


async def test_a_request_that_is_left_again_during_a_report_is_reported_again(
    redis_url: str,
) -> None:
    client = QueueClient(redis_url)
    rid = await client.admit()
    arrived = await lives_until(client, rid)
    async with Follower(client.queue, TokenChannel(client.redis, client.keys)) as follower:
        held = HeldRequests(client.queue, follower, Cancels(client.queue), Metrics("model", 512))

        def comes_and_leaves(keep_s: int) -> None:
            follow = follower.follow(rid, new=False)
            spec = RequestSpec(request_id=rid, keep_ms=1000 * keep_s)
            held.hold(HeldRequest(follow, spec, arrived_ms=0))
            follow.close()
            assert held.leave(follow, "")

        async with held:
            # What is written waits; the gateway's round begins meanwhile, and waits with it.
            await client.redis.execute_command("CLIENT", "PAUSE", PAUSE_MS, "WRITE")
            comes_and_leaves(60)
            await asyncio.sleep(PAUSE_MS / 2000)
            comes_and_leaves(600)
            async with asyncio.timeout(60):
                while await lives_until(client, rid) < arrived + 300_000:
                    await asyncio.sleep(0.05)
    await client.redis.aclose()
