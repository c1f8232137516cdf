"""A queue with short names for what its tests do again and again."""

from typing import Any

from shared.queue import Append, AppendCode, Lifetimes, Places, Queue, connect, token_log
from shared.queue.keys import Keys, new_request_id
from tessera.common.v1 import ending_pb2
from tessera.common.v1.ending_pb2 import Ending
from tessera.common.v1.sampling_pb2 import SamplingParams
from tessera.scheduler.v1.queue_pb2 import RequestSpec
from tessera.scheduler.v1.scheduler_pb2 import GetLoadResponse

NO_LOAD = GetLoadResponse()
STOP = Ending(reason=ending_pb2.FINISH_REASON_STOP)
CANCELLED = ending_pb2.FINISH_REASON_CANCELLED


class QueueClient:
    """One process's queue. `lifetimes` are those of shared/queue/messages.py."""

    def __init__(self, url: str, **lifetimes: int) -> None:
        self.keys = Keys("model")
        self.redis = connect(url)
        self.queue = Queue(self.redis, self.keys, Lifetimes(**lifetimes))

    def with_lifetimes(self, **lifetimes: int) -> None:
        self.queue = Queue(self.redis, self.keys, Lifetimes(**lifetimes))

    def spec(self, *, n: int = 1, max_tokens: int = 5, **fields: Any) -> RequestSpec:
        return RequestSpec(
            request_id=new_request_id(self.keys.tag),
            prompt=token_log.encode_tokens([1, 2, 3]),
            sampling=SamplingParams(n=n, max_tokens=max_tokens),
            **fields,
        )

    async def reserve(self, rid: str, cost: int = 10, **more: Any) -> str:
        limits = {"max_requests": 3, "max_tokens": 100, **more}
        return await self.queue.reserve(rid, cost=cost, **limits)

    async def admit(self, **more: Any) -> str:
        names = ("cost", "prio", "advance_us", "idempotency_key", "fingerprint", "follow_ms")
        options = {"cost": 8, **{k: more.pop(k) for k in names if k in more}}
        spec = self.spec(**more)
        await self.queue.admit(spec, **options)
        return spec.request_id

    async def scheduler(self, sid: str) -> str:
        await self.queue.renew(sid, NO_LOAD, register=True, tokens_per_s=None)
        return sid

    async def take(
        self, sid: str, count: int = 10, tokens: int = 1000, content: str = ""
    ) -> list[str]:
        taken = await self.queue.take(sid, [Places(content, count, tokens)])
        assert taken is not None
        return [t.spec.request_id for t in taken]

    async def append(
        self, sid: str, rid: str, start: int, tokens: list[int], ending: Ending | None = None
    ) -> tuple[AppendCode, int]:
        records = token_log.encode_tokens(tokens)
        (answer,) = await self.queue.append(sid, [Append(rid, 0, start, 4, records, ending)])
        return answer.code, answer.length

    async def ending(self, rid: str) -> Ending | None:
        """Of the first choice."""
        found = await self.queue.read(rid, 1)
        assert found is not None
        return found.endings[0]

    async def tokens(self, rid: str) -> list[int]:
        """Of the first choice, as logged."""
        found = await self.queue.read(rid, 1)
        assert found is not None
        return token_log.decode_tokens(found.records[0])
