"""The way in: door (is there room?), prepare (tokens and media), admit (from here on it ends
exactly once).
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

from services.gateway.answer import Answer
from services.gateway.choice_log import LogLayout
from services.gateway.follower import Follower
from services.gateway.metrics import Metrics
from services.gateway.model import ServedModel
from services.gateway.preprocess_pool import PreprocessPool
from services.gateway.request import ValidRequest, make_spec
from shared.errors import Overloaded, ServingError, Unavailable
from shared.queue import Queue
from shared.token_log import decode_tokens
from tessera.preprocess.v1.preprocess_pb2 import PrepareResponse
from tessera.scheduler.v1.queue_pb2 import RequestSpec

log = structlog.get_logger(__name__)

_CANCEL_RETRY_S = 0.5
_CANCEL_FOR_S = 60.0

# What one step of `priority` is worth in waiting time: longer than anybody waits, so that of two
# requests of one tenant the lower number always goes first.
_PRIORITY_STEP_US = 3_600_000_000

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: the request's name, the API key if keys are in use or else whatever bearer token
    came, the trace, and the arrival by our own clock.
    """

    request_id: str
    api_key: str = ""
    bearer: str = ""
    traceparent: str = ""
    arrived_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What the door lets in: requests in all, and tokens that they may cost together."""

    max_requests: int
    max_tokens: int


class Admission:
    """Takes requests in, and cancels those whose clients have left."""

    def __init__(
        self,
        model: ServedModel,
        queue: Queue,
        pool: PreprocessPool,
        follower: Follower,
        metrics: Metrics,
        limits: Limits,
    ) -> None:
        self._model = model
        self._queue = queue
        self._pool = pool
        self._follower = follower
        self._metrics = metrics
        self._limits = limits
        self._cancels: set[asyncio.Task[None]] = set()

    async def accept(self, request: ValidRequest, caller: Caller) -> Answer:
        """Brings a request into the queue. The answer must be closed.

        Raises Overloaded (the door), whatever preparing raised, InvalidRequest (too long),
        Unavailable (no Redis, no preprocess). Cancelling the call takes the request back, at any
        moment.
        """
        tenant = tenant_of(caller, request.user)
        try:
            await self._enter(request, caller.request_id, tenant)
            return await self._bring_in(request, caller, tenant)
        except ServingError as error:
            self._metrics.rejected(error.reason)
            raise

    async def settled(self) -> None:
        """Waits until every cancellation on its way has arrived."""
        if self._cancels:
            await asyncio.wait(self._cancels)

    async def _enter(self, request: ValidRequest, rid: str, tenant: str) -> None:
        start = time.monotonic()
        call = self._queue.door(
            rid,
            cost=request.cost_bound(self._model),
            max_requests=self._limits.max_requests,
            max_tokens=self._limits.max_tokens,
            tenant=tenant,
        )
        try:
            await _to_its_end(call)
        except Overloaded:  # nothing was reserved
            raise
        except BaseException:
            self._take_back(rid, tenant)
            raise
        self._metrics.stage("door", time.monotonic() - start)

    async def _bring_in(self, request: ValidRequest, caller: Caller, tenant: str) -> Answer:
        try:
            request.prepare.request_id = caller.request_id
            prepared = await self._prepare(request)
            spec = make_spec(
                request,
                prepared,
                self._model,
                request_id=caller.request_id,
                tenant=tenant,
                created_unix_s=int(time.time()),
                traceparent=caller.traceparent,
            )
            return await self._admit(spec, caller, request.priority)
        except BaseException:
            self._take_back(caller.request_id, tenant)
            raise

    async def _prepare(self, request: ValidRequest) -> PrepareResponse:
        if request.prepare.WhichOneof("input") == "token_ids":
            # Checked at the door already, and there is nothing to render or to tokenize.
            return PrepareResponse(token_ids=request.prepare.token_ids)
        start = time.monotonic()
        prepared = await self._pool.prepare(request.prepare)
        self._metrics.stage("preprocess", time.monotonic() - start)
        times = prepared.times
        self._metrics.stage("tokenize", times.tokenize_us / 1e6)
        if prepared.media:
            self._metrics.stage("fetch", times.fetch_us / 1e6)
            self._metrics.stage("decode_media", times.media_us / 1e6)
        return prepared

    async def _admit(self, spec: RequestSpec, caller: Caller, priority: int) -> Answer:
        start = time.monotonic()
        prompt_tokens = len(spec.prompt) // 4
        # Before admission, so that nothing of it can be missed.
        layout = LogLayout.of(spec.sampling, prompt_tokens)
        follow = self._follower.follow(spec.request_id, new=True, layout=layout)
        try:
            cost = prompt_tokens + spec.sampling.best_of * spec.sampling.max_tokens
            advance_us = -priority * _PRIORITY_STEP_US
            await _to_its_end(self._queue.admit(spec, cost=cost, advance_us=advance_us))
        except BaseException:
            follow.close()
            raise
        follow.admitted = True
        self._metrics.stage("admit", time.monotonic() - start)
        return Answer(
            spec,
            prompt_tokens,
            self._model.table,
            follow,
            self._metrics,
            eos_token_ids=self._model.eos_token_ids,
            prompt_ids=decode_tokens(spec.prompt) if shows_prompt_ids(spec) else None,
            arrived_at=caller.arrived_at or start,
            cancel=lambda: self._take_back(spec.request_id, spec.tenant),
        )

    def _take_back(self, request_id: str, tenant: str) -> None:
        """Withdraws and cancels: whichever of the two the request has come to, in the background."""
        task = asyncio.create_task(self._cancel(request_id, tenant))
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)

    async def _cancel(self, request_id: str, tenant: str) -> None:
        give_up_at = time.monotonic() + _CANCEL_FOR_S
        while True:
            try:
                await self._queue.withdraw(request_id, tenant=tenant)
                await self._queue.cancel(request_id, tenant)
                return
            except Unavailable as error:
                if time.monotonic() > give_up_at:
                    log.warning("not cancelled", request_id=request_id, error=error.message)
                    return
            await asyncio.sleep(_CANCEL_RETRY_S)


def shows_prompt_ids(spec: RequestSpec) -> bool:
    """Whether the answer needs the ids of the prompt: to show them, or to name what it scores."""
    return spec.reply.return_token_ids or spec.sampling.HasField("prompt_logprobs")


def tenant_of(caller: Caller, user: str) -> str:
    """Who pays: a checked API key, else `user`, else an unchecked bearer token, else nobody in
    particular.

    Keys and names become digests: tenants stand in Redis keys and in logs.
    """
    names = (("k", caller.api_key), ("u", user), ("b", caller.bearer))
    for kind, name in names:
        if name:
            return kind + hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
    return ""


async def _to_its_end(call: Coroutine[Any, Any, _T]) -> _T:
    """Awaits a call to Redis to its end even if we are cancelled: after half of one nobody knows
    what holds.
    """
    task = asyncio.ensure_future(call)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        with contextlib.suppress(ServingError):
            await task
        raise
