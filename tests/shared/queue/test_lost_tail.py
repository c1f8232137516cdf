"""Wherever the file of Redis is truncated, owners and gateways restore what was in it."""

import asyncio
import contextlib
import random
from dataclasses import dataclass, field

from services.launcher.redis.embedded_redis import EmbeddedRedis
from shared.errors import Unavailable
from shared.queue import Places, RequestSnapshot, TakenRequest
from shared.queue.token_log import encode_tokens
from tessera.common.v1.ending_pb2 import Ending, FinishReason
from tessera.scheduler.v1.queue_pb2 import RequestSpec
from tests.support.queue.client import STOP, QueueClient
from tests.support.queue.lost_tail import written

CANCELLED = Ending(reason=FinishReason.FINISH_REASON_CANCELLED)


@dataclass
class Truth:
    """A request as those who live know it."""

    spec: RequestSpec
    arrived_ms: int
    tokens: list[int] = field(default_factory=list)
    ending: Ending | None = None
    taken: TakenRequest | None = None
    owner: str = ""  # who runs it, or ran it to its end

    def held(self, *, owner: bool) -> RequestSnapshot:
        return RequestSnapshot(
            spec=self.spec,
            logs=(encode_tokens(self.tokens),),
            endings=(self.ending,),
            arrived_ms=self.arrived_ms,
            own_at=self.taken.own_at if owner and self.taken else 0,
            rank=self.taken.rank if owner and self.taken else 0,
        )


class Story:
    """Two schedulers and a gateway at work; one of the schedulers dies together with Redis."""

    def __init__(self, client: QueueClient) -> None:
        self.client = client
        self.random = random.Random(7)
        self.all: dict[str, Truth] = {}
        self.of: dict[str, list[str]] = {"lives": [], "dies": []}

    async def admit(self) -> None:
        spec = self.client.spec(tenant=self.random.choice("ab"), max_tokens=100)
        arrived_ms = await self.client.queue.admit(spec, cost=103)
        self.all[spec.request_id] = Truth(spec, arrived_ms)

    async def take(self, sid: str) -> None:
        for taken in await self.client.queue.take(sid, [Places("", 2, 10**6)]) or []:
            truth = self.all[taken.spec.request_id]
            truth.taken, truth.owner = taken, sid
            self.of[sid].append(taken.spec.request_id)

    async def work(self, sid: str) -> None:
        for rid in list(self.of[sid]):
            truth = self.all[rid]
            fresh = [self.random.randrange(1000) for _ in range(self.random.randrange(4))]
            end = STOP if self.random.random() < 0.15 else None
            await self.client.append(sid, rid, len(truth.tokens), fresh, end)
            truth.tokens += fresh
            truth.ending = end
            if end:
                self.of[sid].remove(rid)

    async def give_back(self, sid: str) -> None:
        if self.of[sid]:
            rid = self.of[sid].pop()
            await self.client.queue.give_back(sid, [rid])
            self.all[rid].owner = ""

    async def cancel(self) -> None:
        waiting = [r for r, t in self.all.items() if t.ending is None and not t.owner]
        if waiting:
            rid = self.random.choice(waiting)
            assert await self.client.queue.cancel(rid, self.all[rid].spec.tenant) == "CANCELLED"
            self.all[rid].ending = CANCELLED

    async def play(self, turns: int) -> None:
        for sid in self.of:
            await self.client.scheduler(sid)
        for _ in range(turns):
            sid = self.random.choice(list(self.of))
            match self.random.randrange(7):
                case 0 | 1:
                    await self.admit()
                case 2:
                    await self.take(sid)
                case 3:
                    await self.give_back(sid)
                case 4:
                    await self.cancel()
                case _:
                    await self.work(sid)

    async def restore(self, client: QueueClient) -> None:
        """The owner that lives and the gateway, in either order."""
        mine = [t.held(owner=True) for t in self.all.values() if t.owner == "lives"]
        seen = [t.held(owner=False) for t in self.all.values()]
        calls = [(mine, "lives"), (seen, "")]
        self.random.shuffle(calls)
        for held, sid in calls:
            assert all(await client.queue.restore(held, sid))

    async def check(self, client: QueueClient) -> None:
        """All that has not ended runs where it ran, or waits with its log; all else has ended as it had."""
        open_ones = {rid for rid, truth in self.all.items() if truth.ending is None}
        assert await client.queue.depth() == (len(open_ones), 103 * len(open_ones))
        # What its owner gave back, in the tail that was lost, seems to be its own still.
        owned = await client.queue.owned("lives")
        assert set(owned) >= set(self.of["lives"])
        assert await client.queue.give_back("lives", owned) == len(owned)
        renewal = await client.queue.renew(
            "next", (await client.queue.loads())[0], register=True, tokens_per_s=None
        )
        assert renewal is not None
        if "dies" in renewal.others:
            await client.queue.fence("dies", renewal.others["dies"])
        taken = await client.queue.take("next", [Places("", 1000, 10**9)])
        assert taken is not None and {t.spec.request_id for t in taken} == open_ones
        for one in taken:
            assert one.logs == (encode_tokens(self.all[one.spec.request_id].tokens),)
        for rid, truth in self.all.items():
            assert await client.tokens(rid) == truth.tokens
            assert await client.ending(rid) == truth.ending
            await client.append("next", rid, len(truth.tokens), [], STOP)
        assert await client.queue.depth() == (0, 0)


async def test_wherever_the_file_is_cut_nothing_is_lost(private_redis: EmbeddedRedis) -> None:
    client = QueueClient(private_redis.url, lease_ms=1)
    story = Story(client)
    await story.play(150)
    await written(private_redis)
    private_redis.kill()
    await client.redis.aclose()
    file = max(private_redis.folder.rglob("*.aof"), key=lambda path: path.stat().st_size)
    whole = file.read_bytes()
    for eighth in range(1, 9):
        file.write_bytes(whole[: len(whole) * eighth // 8])
        await asyncio.to_thread(private_redis.start)
        client = QueueClient(private_redis.url, lease_ms=1)
        await client.redis.set(f"{client.keys.prefix}:recovery", "1")
        with contextlib.suppress(Unavailable):
            await client.scheduler("lives")
        await story.restore(client)
        await client.redis.delete(f"{client.keys.prefix}:recovery")
        await story.check(client)
        await client.redis.aclose()
        private_redis.kill()
