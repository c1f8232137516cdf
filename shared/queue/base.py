"""What all verbs of the queue share: the connection, the scripts, and common arguments."""

import hashlib
from collections.abc import Sequence
from typing import Any

import hiredis
from redis.asyncio import Redis

from shared.errors import Unavailable
from shared.net.redis.connection import Word, connection_of
from shared.queue import token_log
from shared.queue.keys import Keys
from shared.queue.messages import (
    CANCELLED,
    FIRST_TOKEN_TIMEOUT,
    QUEUE_TIMEOUT,
    REQUEST_TIMEOUT,
    Lifetimes,
)
from shared.queue.scripts import Scripts
from tessera.common.v1.ending_pb2 import Ending
from tessera.scheduler.v1.queue_pb2 import RequestSpec

_ENDINGS = tuple(
    ending.SerializeToString()
    for ending in (CANCELLED, QUEUE_TIMEOUT, FIRST_TOKEN_TIMEOUT, REQUEST_TIMEOUT)
)


class Verbs:
    """The queue of one model on one Redis client."""

    def __init__(self, redis: Redis, keys: Keys, lifetimes: Lifetimes | None = None) -> None:
        self._connection = connection_of(redis)
        self._keys = keys
        self._scripts = Scripts(redis, keys.prefix)
        self._lifetimes = lifetimes or Lifetimes()
        # What every script begins with that may end a waiting request: `closing` in the prelude.
        self._closing: tuple[int | bytes, ...] = (
            self._lifetimes.keep_ended_s,
            self._lifetimes.grace_ms,
            *_ENDINGS,
        )

    async def _ask(self, commands: list[tuple[Word, ...]]) -> list[Any]:
        """Reads in one round trip. Raises Unavailable."""
        answers = await self._connection.call_all(commands)
        for answer in answers:
            if isinstance(answer, hiredis.ReplyError):
                raise Unavailable("REDIS_UNAVAILABLE", f"Redis: {answer}")
        return answers

    def _idem(self, tenant: str, digest: str) -> str:
        return f"{self._keys.prefix}:idem:{tenant}:{digest}" if digest else ""


def key_digest(idempotency_key: str) -> str:
    """The name of an idempotency key in Redis; empty for none."""
    if not idempotency_key:
        return ""
    return hashlib.blake2b(idempotency_key.encode(), digest_size=16).hexdigest()


def head_of(spec: RequestSpec) -> RequestSpec:
    """The spec without prompt and media: what late readers need. The prompt stays where the answer shows it."""
    head = RequestSpec()
    head.CopyFrom(spec)
    if not (spec.reply.return_token_ids or spec.sampling.HasField("prompt_logprobs")):
        head.ClearField("prompt")
    head.ClearField("media")
    return head


def request_words(
    spec: RequestSpec, *, idem: str, prio: str, cost: int, follow_ms: int
) -> tuple[str | bytes | int, ...]:
    """A request as `admit` and `restore` get it: `request_at` in the prelude."""
    sampling = spec.sampling
    return (
        spec.request_id,
        spec.SerializeToString(),
        head_of(spec).SerializeToString(),
        prio,
        spec.tenant,
        cost,
        sampling.n,
        len(spec.prompt) // 4,
        token_log.stride(
            sampling.logprobs if sampling.HasField("logprobs") else None, spec.pooling.width
        ),
        spec.media_cost,
        spec.timeout_ms,
        spec.queue_timeout_ms,
        spec.first_token_timeout_ms,
        idem,
        spec.fingerprint,
        follow_ms,
    )


def pairs(flat: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Two by two."""
    return list(zip(flat[::2], flat[1::2], strict=True))


def ending_or_none(data: bytes | None) -> Ending | None:
    """A stored ending."""
    return Ending.FromString(data) if data else None
