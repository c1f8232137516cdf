"""The request queue and the token log in Redis: verbs for gateways (door, admit, cancel, read) and schedulers (take,
append, renew, fence, give back). Every verb that writes is one script of `shared/scripts/`: it happens whole or not.
"""

import hashlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import hiredis
from redis.asyncio import Redis

from shared import token_log
from shared.errors import Conflict, Expired, Overloaded, Unavailable
from shared.keys import Keys
from shared.log_event import EventWriter
from shared.redis_line import Subscription, Word, line_of
from shared.scripts import Scripts
from tessera.common.v1.ending_pb2 import Ending, FinishReason
from tessera.scheduler.v1.queue_pb2 import LogBatch, RequestSpec
from tessera.scheduler.v1.scheduler_pb2 import GetLoadResponse

LEASE_MS = 1_500
RESERVATION_MS = 15_000
KEEP_ENDED_S = 600

CANCELLED = Ending(reason=FinishReason.FINISH_REASON_CANCELLED)
EXPIRED = Ending(
    reason=FinishReason.FINISH_REASON_ERROR,
    failure=Expired(
        "QUEUE_TIMEOUT", "the request's time ran out while it waited; retry later"
    ).to_failure(),
)
_CANCELLED = CANCELLED.SerializeToString()
_EXPIRED = EXPIRED.SerializeToString()


def connect(url: str) -> Redis:
    """A Redis client for scripts and logs. Values are bytes; connects at the first command."""
    client: Redis = Redis.from_url(url, socket_connect_timeout=2, health_check_interval=0)
    return client


@dataclass(frozen=True, slots=True)
class TakenRequest:
    """A request that now belongs to the caller, with the log of what was generated before."""

    spec: RequestSpec
    own_at: int
    arrived_ms: int
    logs: tuple[bytes, ...]
    endings: tuple[Ending | None, ...]
    prio: str = "interactive"
    prompt_log: bytes = b""  # log-probabilities of the prompt, as far as they are written


@dataclass(frozen=True, slots=True)
class Append:
    """What one step adds to the log of one choice: `records` from index `start` on, and its ending if it has one."""

    request_id: str
    choice: int
    start: int
    stride: int
    records: bytes
    ending: Ending | None = None


class AppendCode(IntEnum):
    """What became of an `Append`."""

    OK = 0
    REFUSED = 1  # no longer the owner: drop the sequence, never retry
    CANCEL = 2  # written, and the client has cancelled
    GAP = 3  # the log is shorter than `start`: send again from the length


@dataclass(frozen=True, slots=True)
class AppendAnswer:
    """The code and the number of records in the log now."""

    code: AppendCode
    length: int


@dataclass(frozen=True, slots=True)
class Renewal:
    """The other schedulers and when their leases end, with the time on Redis's clock (ms)."""

    now_ms: int
    others: dict[str, float]


@dataclass(frozen=True, slots=True)
class RequestLog:
    """The truth about a request: its head (the spec without prompt and media); records and ending of each choice."""

    head: RequestSpec
    state: str
    prompt_tokens: int
    arrived_ms: int
    records: tuple[bytes, ...]
    endings: tuple[Ending | None, ...]


@dataclass(frozen=True, slots=True)
class LogNews:
    """What the log of one choice holds from some index on."""

    records: bytes
    ending: Ending | None


class Queue:
    """The verbs, on one Redis client."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._line = line_of(redis)
        self._keys = keys
        self._scripts = Scripts(redis, keys.prefix)

    # Gateways

    async def door(
        self,
        request_id: str,
        *,
        cost: int,
        max_requests: int,
        max_tokens: int,
        tenant: str = "",
        idempotency_key: str = "",
        fingerprint: bytes = b"",
    ) -> str:
        """Reserves a place for `cost` tokens (an upper bound), before any media work.

        Returns the id to go on with: this one, or that of the running request with the same idempotency key.
        Raises Overloaded with `retry_after_s`, or Conflict if the key came with another body.
        """
        answer = await self._scripts.call(
            "door",
            request_id,
            cost,
            max_requests,
            max_tokens,
            RESERVATION_MS,
            self._idem(tenant, idempotency_key),
            fingerprint,
        )
        match answer:
            case [b"OK"]:
                return request_id
            case [b"EXISTS", known]:
                return str(known, "ascii")
            case [b"CONFLICT", _]:
                raise Conflict(
                    "IDEMPOTENCY_KEY_REUSED",
                    "this Idempotency-Key came with another request body; use a new key",
                )
            case [b"FULL", which, seconds]:
                limit = max_requests if which == b"requests" else max_tokens
                raise Overloaded(
                    "QUEUE_FULL",
                    f"the queue is full ({which.decode()}: limit {limit}); retry after {int(seconds)} s",
                    retry_after_s=str(int(seconds)),
                )
        raise AssertionError(answer)

    async def withdraw(
        self, request_id: str, *, tenant: str = "", idempotency_key: str = ""
    ) -> None:
        """Gives a reservation back: preparing failed, or the client left before admission."""
        await self._scripts.call("withdraw", request_id, self._idem(tenant, idempotency_key))

    async def admit(
        self,
        spec: RequestSpec,
        *,
        cost: int,
        prio: str = "interactive",
        advance_us: int = 0,
        idempotency_key: str = "",
    ) -> int:
        """Accepts a prepared request: from now on it ends exactly once, whatever dies.

        `cost` is its exact number of tokens (prompt and the most it may generate), `prio` "interactive" or "batch",
        `advance_us` moves it ahead of those that came that much earlier. Returns the arrival (ms, Redis TIME).
        """
        head = RequestSpec()
        head.CopyFrom(spec)
        head.ClearField("prompt")
        head.ClearField("media")
        arrived = await self._scripts.call(
            "admit",
            spec.request_id,
            spec.SerializeToString(),
            head.SerializeToString(),
            prio,
            spec.tenant,
            cost,
            spec.sampling.n,
            len(spec.prompt) // 4,
            spec.timeout_ms,
            advance_us,
            self._idem(spec.tenant, idempotency_key),
        )
        return int(arrived)

    async def cancel(self, request_id: str, tenant: str = "") -> str:
        """Cancels: "CANCELLED" if it was waiting, "FLAGGED" if its owner must, "ENDED" or "UNKNOWN"."""
        answer = await self._scripts.call("cancel", request_id, tenant, _CANCELLED, KEEP_ENDED_S)
        return str(answer, "ascii")

    async def read(
        self, request_id: str, choices: int, *, after: Sequence[int] | None = None, stride: int = 4
    ) -> RequestLog | None:
        """Reads log and endings, each choice's records from index `after` on. None if there is no such request."""
        fields = ["head", "state", "prompt_tokens", "arrived_ms"]
        fields += [f"e{choice}" for choice in range(choices)]
        commands: list[tuple[Word, ...]] = [("HMGET", self._keys.request(request_id), *fields)]
        for choice in range(choices):
            start = stride * (after[choice] if after else 0)
            commands.append(("GETRANGE", self._keys.log(request_id, choice), start, -1))
        found, *records = await self._ask(commands)
        head, state, prompt_tokens, arrived_ms, *endings = found
        if state is None:
            return None
        return RequestLog(
            head=RequestSpec.FromString(head),
            state=state.decode(),
            prompt_tokens=int(prompt_tokens),
            arrived_ms=int(arrived_ms),
            records=tuple(records),
            endings=tuple(Ending.FromString(e) if e else None for e in endings),
        )

    async def read_news(
        self, wanted: Sequence[tuple[str, int, int]], *, stride: int = 4
    ) -> list[LogNews | None]:
        """Reads many choices in one round trip, each given as (request id, choice, index to read from).

        None where there is no such request. The ending is read before the log, so a log with an ending is whole.
        """
        commands: list[tuple[Word, ...]] = []
        for request_id, choice, after in wanted:
            commands += (
                ("HMGET", self._keys.request(request_id), "state", f"e{choice}"),
                ("GETRANGE", self._keys.log(request_id, choice), stride * after, -1),
            )
        found = await self._ask(commands)
        return [
            LogNews(records, Ending.FromString(ending) if ending else None) if state else None
            for (state, ending), records in _pairs(found)
        ]

    async def loads(self) -> list[GetLoadResponse]:
        """What the live schedulers hold, as of their last renewal."""
        (loads,) = await self._ask([("HVALS", self._keys.load)])
        return [GetLoadResponse.FromString(load) for load in loads]

    async def depth(self) -> tuple[int, int]:
        """Requests reserved, waiting or running, and the tokens they may cost in all."""
        commands = [("HLEN", self._keys.live), ("HGET", self._keys.meta, "live_tokens")]
        requests, tokens = await self._ask([*commands])
        return int(requests), int(tokens or 0)

    # Schedulers

    async def renew(
        self,
        scheduler_id: str,
        load: GetLoadResponse,
        *,
        register: bool,
        tokens_per_s: float | None,
    ) -> Renewal | None:
        """Renews the lease. None means that others have fenced this scheduler off: stop at once."""
        answer = await self._scripts.call(
            "renew",
            scheduler_id,
            LEASE_MS,
            int(register),
            load.SerializeToString(),
            "" if tokens_per_s is None else f"{tokens_per_s:.1f}",
        )
        if answer[0] == b"GONE":
            return None
        others = {str(sid, "ascii"): float(deadline) for sid, deadline in _pairs(answer[2:])}
        return Renewal(int(answer[1]), others)

    async def take(
        self, scheduler_id: str, *, max_requests: int, max_tokens: int
    ) -> list[TakenRequest] | None:
        """Becomes the owner of the fairest waiting requests. None means fenced off; empty also while Redis recovers."""
        answer = await self._scripts.call(
            "take", scheduler_id, max_requests, max_tokens, _CANCELLED, _EXPIRED, KEEP_ENDED_S
        )
        if answer[0] == b"GONE":
            return None
        return [_taken(item) for item in answer[1:]]

    async def append(self, scheduler_id: str, appends: Sequence[Append]) -> list[AppendAnswer]:
        """Writes what one step gave, in one call and one message. Answers in the order given."""
        answers = [
            AppendAnswer(AppendCode.OK, a.start + len(a.records) // a.stride) for a in appends
        ]
        events = [
            EventWriter(a.request_id, a.choice, a.stride).event(a.start, a.records, a.ending)
            for a in appends
        ]
        for index, answer in await self.append_events(scheduler_id, b"".join(events)):
            answers[index] = answer
        return answers

    async def append_events(
        self, scheduler_id: str, batch: bytes
    ) -> list[tuple[int, AppendAnswer]]:
        """The same for a serialized `LogBatch`. Tells only of events that were not simply appended, by index."""
        found = await self._scripts.call("append", scheduler_id, KEEP_ENDED_S, batch)
        triples = zip(found[::3], found[1::3], found[2::3], strict=True)
        return [(i, AppendAnswer(AppendCode(code), int(length))) for i, code, length in triples]

    async def cancelled(self, request_ids: Sequence[str]) -> list[str]:
        """Those of the requests whose client has cancelled: catches what the control channel lost."""
        if not request_ids:
            return []
        flags = await self._ask([("HGET", self._keys.request(r), "cancel") for r in request_ids])
        return [rid for rid, flag in zip(request_ids, flags, strict=True) if flag == b"1"]

    async def give_back(self, scheduler_id: str, request_ids: Sequence[str]) -> int:
        """Puts requests back at the head of the queue with their logs. Returns how many were still owned."""
        return int(
            await self._scripts.call(
                "give_back", scheduler_id, _CANCELLED, KEEP_ENDED_S, *request_ids
            )
        )

    async def fence(self, dead_id: str, deadline_ms: float) -> int:
        """Removes a scheduler whose lease is over and frees its requests; -1 if that turns out untrue."""
        return int(
            await self._scripts.call("fence", dead_id, repr(deadline_ms), _CANCELLED, KEEP_ENDED_S)
        )

    async def leave(self, scheduler_id: str) -> None:
        """An orderly end, after `give_back`."""
        await self._scripts.call("leave", scheduler_id)

    async def lease_decoder(self, decoder_id: str, scheduler_id: str) -> int:
        """Binds a decoder: returns the lease, or 0 if another live scheduler has it."""
        return int(await self._scripts.call("lease_decoder", decoder_id, scheduler_id, ""))

    async def free_decoder(self, decoder_id: str, scheduler_id: str) -> None:
        """Lets a decoder go."""
        await self._scripts.call("lease_decoder", decoder_id, "", scheduler_id)

    async def _ask(self, commands: list[tuple[Word, ...]]) -> list[Any]:
        """Reads in one round trip. Raises Unavailable."""
        answers = await self._line.call_all(commands)
        for answer in answers:
            if isinstance(answer, hiredis.ReplyError):
                raise Unavailable("REDIS_UNAVAILABLE", f"Redis: {answer}")
        return answers

    def _idem(self, tenant: str, key: str) -> str:
        if not key:
            return ""
        digest = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
        return f"{self._keys.prefix}:idem:{tenant}:{digest}"


class TokenChannel:
    """Follows the token channel. A hint, not the truth: what is missed is read from the log."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys

    async def batches(self) -> AsyncIterator[LogBatch]:
        """Yields what is appended from now on. Raises Unavailable when the connection breaks: call again."""
        async for message in _messages(self._redis, self._keys.token_channel):
            yield LogBatch.FromString(message)


class ControlChannel:
    """Follows the control channel: work arrived, a running request was cancelled."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys

    async def messages(self) -> AsyncIterator[str | None]:
        """Yields the id of a cancelled request, or None for "there is work". Raises Unavailable on a break."""
        async for message in _messages(self._redis, self._keys.control_channel):
            yield str(message[1:], "ascii") if message[:1] == b"c" else None


def tokens_of(log: bytes, stride: int) -> list[int]:
    """The token ids of a log."""
    return token_log.decode_tokens(log, stride)


async def _messages(redis: Redis, channel: str) -> AsyncIterator[bytes]:
    subscription = Subscription(redis, channel)
    try:
        await subscription.open()
        while True:
            for message in await subscription.messages():
                yield message
    finally:
        await subscription.give_back()


def _pairs(flat: Sequence[Any]) -> list[tuple[Any, Any]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def _taken(item: Sequence[Any]) -> TakenRequest:
    _, spec, own_at, arrived_ms, logs, prio, prompt_log = item
    return TakenRequest(
        spec=RequestSpec.FromString(spec),
        own_at=int(own_at),
        arrived_ms=int(arrived_ms),
        logs=tuple(logs[::2]),
        endings=tuple(Ending.FromString(e) if e else None for e in logs[1::2]),
        prio=prio.decode(),
        prompt_log=prompt_log,
    )
