"""Thousands of requests through all verbs, with dying schedulers: each ends once, and Redis is empty afterwards."""

import asyncio
import random
from typing import Any

import pytest

from shared.errors import Conflict, Overloaded
from shared.net import tasks
from shared.queue import Append, AppendCode, Places, TakenRequest
from shared.queue.keys import new_request_id
from shared.queue.scripts import Scripts
from shared.queue.token_log import encode_tokens
from tessera.common.v1 import ending_pb2
from tessera.common.v1.ending_pb2 import Ending
from tests.support.queue.client import NO_LOAD, STOP, QueueClient
from tests.support.queue.listening import listening

REQUESTS = 2500
LEFT = {"meta"}  # the keys that stay
ENDINGS = (
    STOP,
    STOP,
    Ending(reason=ending_pb2.FINISH_REASON_LENGTH),
    Ending(reason=ending_pb2.FINISH_REASON_ERROR),
)


class Soak:
    """Gateways and schedulers that do what comes into their heads."""

    def __init__(self, client: QueueClient) -> None:
        self.client = client
        self.queue = client.queue
        self.scripts = Scripts(client.redis, client.keys.prefix)
        self.random = random.Random(4)
        self.admitted: dict[str, int] = {}  # request -> choices

    async def ask(self) -> None:
        """One client's request, up to its admission, and what becomes of the client."""
        draw = self.random
        tenant = f"t{draw.randrange(200)}"
        key = draw.choice(("", "", f"k{draw.randrange(50)}"))
        spec = self.client.spec(
            n=draw.choice((1, 1, 2)),
            tenant=tenant,
            timeout_ms=draw.choice((0, 0, 0, 200)),
            queue_timeout_ms=draw.choice((0, 0, 0, 100)),
        )
        rid = spec.request_id
        more: dict[str, Any] = {"idempotency_key": key, "fingerprint": b"body"}
        try:
            if (
                await self.client.reserve(
                    rid, max_requests=300, max_tokens=10**6, **more, tenant=tenant
                )
                != rid
            ):
                return
        except (Overloaded, Conflict):
            await asyncio.sleep(0.001)
            return
        fate = draw.random()
        if fate < 0.05:
            return  # the gateway dies: nobody withdraws
        if fate < 0.1:
            await self.queue.withdraw(rid, tenant=tenant, idempotency_key=key)
            return
        prio = draw.choice(("interactive", "interactive", "batch"))
        follow_ms = draw.choice((50, 10_000, 10_000))
        try:
            await self.queue.admit(spec, cost=13, prio=prio, follow_ms=follow_ms, **more)
        except Conflict:
            return
        self.admitted[rid] = spec.sampling.n
        if fate < 0.2:
            await self.queue.cancel(rid, tenant)
        elif fate < 0.6:
            await self.queue.follow({rid: 10_000})
        elif fate < 0.65:
            await self.queue.expire([rid])

    async def serve(self) -> None:
        """A scheduler and its decoder, from their start to their end, be that orderly or not."""
        draw = self.random
        sid, did = (new_request_id("s") for _ in range(2))
        await self.client.scheduler(sid)
        await self.scripts.call("announce", "decoder", did, "nowhere", 1, 50)
        await self.queue.lease_decoder(did, sid)
        held: list[TakenRequest] = []
        for _ in range(draw.randrange(2, 8)):
            held += await self.queue.take(sid, [Places("", 20, 10**6)]) or []
            await self.step(sid, held)
        if draw.random() < 0.5:
            return  # dies with all that it holds
        await self.queue.give_back(sid, [t.spec.request_id for t in held[:5]])
        await self.queue.free_decoder(did, sid)
        await self.queue.leave(sid)

    async def step(self, sid: str, held: list[TakenRequest]) -> None:
        draw = self.random
        appends: list[Append] = []
        for taken in held:
            for choice, (log, ending) in enumerate(zip(taken.logs, taken.endings, strict=True)):
                if ending is None:
                    end = draw.choice((None, None, *ENDINGS))
                    records = encode_tokens([1] * draw.randrange(3))
                    rid = taken.spec.request_id
                    appends.append(Append(rid, choice, len(log) // 4, 4, records, end))
        answers = await self.queue.append(sid, appends)
        gone = {
            a.request_id
            for a, answer in zip(appends, answers, strict=True)
            if a.ending is not None or answer.code is not AppendCode.OK
        }
        gone |= set(await self.queue.abandoned([t.spec.request_id for t in held]))
        given_up = [t.spec.request_id for t in held if t.spec.request_id in gone]
        await self.queue.give_back(sid, given_up)
        held[:] = [t for t in held if t.spec.request_id not in gone]
        if draw.random() < 0.2:
            await self.queue.give_back(sid, [t.spec.request_id for t in held])
            held.clear()

    async def look_after(self) -> None:
        """A scheduler that only fences and sweeps."""
        while True:
            renewal = await self.queue.renew("z", NO_LOAD, register=True, tokens_per_s=1e6)
            assert renewal is not None
            for sid, deadline in renewal.others.items():
                if deadline < renewal.now_ms:
                    await self.queue.fence(sid, deadline)
            await self.queue.sweep()
            await asyncio.sleep(0.02)

    async def ask_all(self, count: int) -> None:
        for _ in range(count):
            await self.ask()

    async def serve_all(self) -> None:
        while True:
            await self.serve()
            await asyncio.sleep(0)


@pytest.mark.full
async def test_redis_is_empty_afterwards(client: QueueClient) -> None:
    client.with_lifetimes(lease_ms=100, reservation_ms=50, keep_ended_s=1, grace_ms=0)
    soak = Soak(client)
    async with listening(client.redis, client.keys) as received:
        looks = asyncio.create_task(soak.look_after())
        serve = [asyncio.create_task(soak.serve_all()) for _ in range(3)]
        await asyncio.gather(*(soak.ask_all(REQUESTS // 20) for _ in range(20)))
        while await client.queue.depth() != (0, 0):
            await asyncio.sleep(0.05)
        await tasks.end(*serve)
        while len(await client.redis.keys("*")) > len(LEFT) + 2:  # and the sweeper's own
            await asyncio.sleep(0.05)
        await tasks.end(looks)
        for rid, n in soak.admitted.items():
            await received.ended(rid, n)
    await client.queue.leave("z")
    left: list[Any] = await client.redis.keys("*")
    assert {str(key, "ascii").split(":")[-1] for key in left} == LEFT
    assert len(soak.admitted) > REQUESTS / 2
    wanted = {(rid, choice): 1 for rid, n in soak.admitted.items() for choice in range(n)}
    assert received.endings == wanted
