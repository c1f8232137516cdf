"""Admission: a request's cost is reserved in the queue, its tokens and media are prepared, then it is
admitted: from there on it ends exactly once.
"""

import asyncio
import functools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import structlog

from services.gateway.admission.caller import Caller, tenant_of
from services.gateway.admission.held_requests import HeldRequest, HeldRequests, follow_ms
from services.gateway.admission.preprocess_pool import PreprocessPool
from services.gateway.admission.request_options import NO_OPTIONS, RequestOptions
from services.gateway.admission.request_spec import make_spec
from services.gateway.admission.resume import Resumption, shows_prompt_ids
from services.gateway.admission.sent_files import SentFiles
from services.gateway.following.answer import Answer
from services.gateway.following.cancels import Cancels
from services.gateway.following.choice_log import LogLayout
from services.gateway.following.follower import Follower
from services.gateway.model.served_model import ServedModel
from services.gateway.reading.structured.grammars import Grammars
from services.gateway.reading.valid_request import ValidRequest
from services.gateway.redis_calls import asked_again, to_its_end, until_recovered, within
from services.gateway.telemetry.metrics.metrics import Metrics
from services.gateway.telemetry.traces.sampling import Sampler, never_sampled
from services.gateway.timings import USUAL, Timings
from shared.environment import monotonic, unix_time
from shared.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    Overloaded,
    ServingError,
)
from shared.net import tasks
from shared.queue import Queue, cost_of
from shared.queue.token_log import decode_tokens
from shared.telemetry.request_names import names
from shared.telemetry.timeline import Timelines
from tessera.preprocess.v1.preprocess_pb2 import PrepareRequest, PrepareResponse
from tessera.scheduler.v1.queue_pb2 import RequestSpec

log = structlog.get_logger(__name__)

# How often a request that came again checks whether the first has been admitted.
_PREPARED_YET_S = 0.1

# What one step of `priority` is worth in waiting time: longer than anybody waits, so that of two
# requests of one tenant the lower number always goes first.
_PRIORITY_STEP_US = 3_600_000_000


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How many requests may be in the queue, and how many tokens they may cost together."""

    max_requests: int
    max_tokens: int


class Admission:
    """Brings requests into the queue."""

    def __init__(
        self,
        model: ServedModel,
        queue: Queue,
        pool: PreprocessPool,
        sent_files: SentFiles,
        follower: Follower,
        held_requests: HeldRequests,
        cancels: Cancels,
        resumption: Resumption,
        metrics: Metrics,
        limits: QueueLimits,
        grammars: Grammars,
        timelines: Timelines,
        *,
        timings: Timings = USUAL,
        shares_prefixes: bool = True,
        sampler: Sampler = never_sampled,
    ) -> None:
        """`shares_prefixes`: whether tenants use prefixes that were computed for each other. `sampler`: whose traces
        are exported."""
        self._model = model
        self._queue = queue
        self._pool = pool
        self._sent_files = sent_files
        self._follower = follower
        self._held_requests = held_requests
        self._cancels = cancels
        self._resumption = resumption
        self._metrics = metrics
        self._limits = limits
        self._grammars = grammars
        self._timelines = timelines
        self._sampler = sampler
        self._timings = timings
        self._shares_prefixes = shares_prefixes

    async def accept(
        self, request: ValidRequest, caller: Caller, options: RequestOptions = NO_OPTIONS
    ) -> Answer:
        """Brings a request into the queue, or follows the one that came with its idempotency key
        before. The answer must be closed.

        Raises Overloaded (no room in the queue), Conflict (the key), whatever preparing raised,
        InvalidRequest (too long), Unavailable (no Redis, no preprocess). Cancelling the call takes the request
        back, at any moment.
        """
        tenant = tenant_of(caller, request.user)
        with self._timelines.held(caller.request_id):
            await self._compile_forms([request], options)
            self._note_read(caller)
            try:
                known = await self._enter(request, caller, options, tenant)
                return known or await self._prepare_and_admit(request, caller, options, tenant)
            except ServingError as error:
                self._metrics.rejected(error.reason)
                raise

    async def accept_all(
        self,
        requests: Sequence[ValidRequest],
        callers: Sequence[Caller],
        options: RequestOptions = NO_OPTIONS,
    ) -> list[Answer]:
        """Brings the prompts of one client's request into the queue, each under a name of its own, or
        none of them. Every answer must be closed.

        Raises what `accept` raises, with the prompt's number where it is about a prompt.
        """
        with ExitStack() as held:
            for caller in callers:
                held.enter_context(self._timelines.held(caller.request_id))
                self._note_read(caller)
            return await self._accept_all(requests, callers, options)

    async def _accept_all(
        self, requests: Sequence[ValidRequest], callers: Sequence[Caller], options: RequestOptions
    ) -> list[Answer]:
        tenant = tenant_of(callers[0], requests[0].user)
        if options.last_event_id:
            raise InvalidRequest(
                "NO_RESUME_OF_SEVERAL_PROMPTS",
                "Last-Event-ID is not for several prompts: leave it out to get all from the beginning",
                field="Last-Event-ID",
            )
        await self._compile_forms(requests, options)
        every = [options.of_part(index) for index in range(len(requests))]
        asked = list(zip(requests, callers, every, strict=True))
        answers: dict[int, Answer] = {}
        try:
            for index, (request, caller, own) in enumerate(asked):
                known = await self._enter(request, caller, own, tenant)
                if known is not None:
                    answers[index] = known
            new = [index for index in range(len(asked)) if index not in answers]
            # Nothing can be refused any more once all are specified.
            specs = await tasks.together(
                self._specify_one_of(index, *asked[index], tenant) for index in new
            )
            for index, spec in zip(new, specs, strict=True):
                answers[index] = await self._admit(spec, *asked[index])
        except BaseException as error:
            for answer in answers.values():
                answer.close()
            for index, (_, caller, own) in enumerate(asked):
                if index not in answers:
                    self._cancels.add(caller.request_id, tenant, own.idempotency_key)
            if isinstance(error, ServingError):
                self._metrics.rejected(error.reason)
            raise
        return [answers[index] for index in range(len(asked))]

    async def settled(self) -> None:
        """Waits until those whose clients have left are taken back."""
        await self._cancels.settled()

    async def _compile_forms(
        self, requests: Sequence[ValidRequest], options: RequestOptions
    ) -> None:
        """Before anything is reserved: a form that cannot be held to costs nothing else."""
        timeout_ms = options.timeouts.waiting_ms
        try:
            for request in requests:
                await self._grammars.compile_for(request, timeout_ms)
                if request.within_reasoning is not None:
                    await self._grammars.compile_for(request.within_reasoning, timeout_ms)
        except ServingError as error:
            self._metrics.rejected(error.reason)
            raise

    async def _enter(
        self, request: ValidRequest, caller: Caller, options: RequestOptions, tenant: str
    ) -> Answer | None:
        """Reserves the request's cost and returns None; or returns an answer where a request with the
        same key is in the queue. One that is still being prepared is waited for; if its gateway
        dies, the reservation passes to this request.
        """
        is_known = False
        while True:
            known = await self._reserve(request, caller.request_id, options, tenant)
            if known == caller.request_id:
                break
            if not is_known:
                is_known = True
                self._metrics.known_again()
            answer = await self._resumption.join(
                known, tenant, options.last_event_id, request.reply
            )
            if answer is not None:
                return answer
            await asyncio.sleep(_PREPARED_YET_S)
        if options.last_event_id:
            self._cancels.add(caller.request_id, tenant, options.idempotency_key)
            raise NotFound(
                "REQUEST_NOT_FOUND",
                "the request of this Idempotency-Key is gone: without Last-Event-ID it runs anew",
                field="Last-Event-ID",
            )
        return None

    async def _reserve(
        self, request: ValidRequest, rid: str, options: RequestOptions, tenant: str
    ) -> str:
        start = monotonic()
        if options.idempotency_key:
            await until_recovered(self._queue)
        call = self._queue.reserve(
            rid,
            cost=request.cost_bound(self._model),
            max_requests=self._limits.max_requests,
            max_tokens=self._limits.max_tokens,
            tenant=tenant,
            prio=options.prio,
            queue_timeout_ms=options.timeouts.queue_ms,
            first_token_timeout_ms=options.timeouts.first_token_ms,
            idempotency_key=options.idempotency_key,
            fingerprint=options.fingerprint,
        )
        try:
            known = await within(call, self._timings.reserve_s)
        except (Overloaded, Conflict):  # nothing was reserved
            raise
        except BaseException:
            self._cancels.add(rid, tenant, options.idempotency_key)
            raise
        self._metrics.stage("reserve", monotonic() - start)
        self._timelines.span(rid, "reserve", start)
        log.debug("reserved", request_id=rid, known=known != rid)
        return known

    async def _prepare_and_admit(
        self, request: ValidRequest, caller: Caller, options: RequestOptions, tenant: str
    ) -> Answer:
        try:
            spec = await self._specify(request, caller, options, tenant)
            return await self._admit(spec, request, caller, options)
        except Conflict as error:
            # Preparing took longer than the reservation holds, and another gateway was faster.
            known = error.metadata.get("request_id", "")
            answer = await self._resumption.join(known, tenant, "", request.reply)
            if answer is None:
                raise
            return answer
        except BaseException:
            self._cancels.add(caller.request_id, tenant, options.idempotency_key)
            raise

    async def _specify(
        self,
        request: ValidRequest,
        caller: Caller,
        options: RequestOptions,
        tenant: str,
        *,
        is_one_of_several: bool = False,
    ) -> RequestSpec:
        request.prepare.request_id = caller.request_id
        request.prepare.client_request_id = caller.client_request_id
        request.prepare.traceparent = caller.traceparent
        request.prepare.tenant = tenant
        prepared = await self._prepare(request, caller)
        if is_one_of_several:  # they have been prepared together, and may have long lists
            await self._follower.slices.turn()
        return make_spec(
            request,
            prepared,
            self._model,
            options,
            request_id=caller.request_id,
            tenant=tenant,
            created_unix_s=int(unix_time()),
            traceparent=caller.traceparent,
            traced=self._sampler(caller.request_id, caller.traceparent),
            shares_prefixes=self._shares_prefixes,
            client_request_id=caller.client_request_id,
        )

    async def _specify_one_of(
        self,
        index: int,
        request: ValidRequest,
        caller: Caller,
        options: RequestOptions,
        tenant: str,
    ) -> RequestSpec:
        try:
            return await self._specify(request, caller, options, tenant, is_one_of_several=True)
        except InvalidRequest as error:
            named = {**error.metadata, "field": f"prompt[{index}]"}
            message = f"prompt[{index}]: {error.message.removeprefix('prompt: ')}"
            raise InvalidRequest(error.reason, message, **named) from error

    async def _prepare(self, request: ValidRequest, caller: Caller) -> PrepareResponse:
        if request.prepare.WhichOneof("input") == "token_ids":
            # Its ids have been checked, and there is nothing to render or to tokenize.
            return PrepareResponse(token_ids=request.prepare.token_ids)
        if request.has_short_prompt:
            return await self._prepared(request, request.prepare)
        one, inline = request.prepare, request.inline_media
        async with self._sent_files.serialized(one, caller, inline) as prompt:
            return await self._prepared(request, prompt)

    async def _prepared(
        self, request: ValidRequest, prompt: PrepareRequest | bytes
    ) -> PrepareResponse:
        start, asked = monotonic(), list[str]()
        prepared = await self._pool.prepare(prompt, asked)
        self._metrics.stage("preprocess", monotonic() - start)
        times = prepared.times
        self._metrics.stage("tokenize", times.tokenize_us / 1e6)
        if prepared.media:
            self._metrics.stage("fetch", times.fetch_us / 1e6)
            self._metrics.stage("decode_media", times.media_us / 1e6)
            self._metrics.media(len(prepared.media), prepared.cached_media)
        self._note_prepared(request.prepare.request_id, prepared, start, asked)
        log.debug(
            "prepared",
            **_names(request.prepare),
            prompt_tokens=len(prepared.token_ids) // 4,
            media=len(prepared.media),
            seconds=round(monotonic() - start, 4),
        )
        return prepared

    async def _admit(
        self, spec: RequestSpec, request: ValidRequest, caller: Caller, options: RequestOptions
    ) -> Answer:
        start = monotonic()
        prompt_tokens = len(spec.prompt) // 4
        # Before admission, so that nothing of it can be missed.
        layout = LogLayout.of(spec, prompt_tokens)
        follow = self._follower.follow(spec.request_id, new=True, layout=layout)
        advance_us = -request.priority * _PRIORITY_STEP_US
        try:
            admit = functools.partial(
                self._queue.admit,
                spec,
                cost=cost_of(spec),
                prio=options.prio,
                advance_us=advance_us,
                idempotency_key=options.idempotency_key,
                fingerprint=options.fingerprint,
                follow_ms=follow_ms(spec.keep_ms),
            )
            arrived_ms = await to_its_end(asked_again(admit))
        except BaseException:
            follow.close()
            raise
        follow.admitted = True
        rank = arrived_ms * 1000 - advance_us
        self._held_requests.hold(
            HeldRequest(follow, spec, arrived_ms, options.prio, rank, options.idempotency_key),
            options.timeouts,
        )
        self._metrics.stage("admit", monotonic() - start)
        self._timelines.span(spec.request_id, "admit", start, prompt_tokens=prompt_tokens)
        log.debug("admitted", **_names(spec), prio=options.prio)
        return Answer(
            spec,
            prompt_tokens,
            self._model.table,
            follow,
            self._metrics,
            own_eos_ids=self._model.own_eos_ids,
            forms=self._model.forms,
            prompt_ids=decode_tokens(spec.prompt) if shows_prompt_ids(spec) else None,
            arrived_at=caller.arrived_at or start,
            leave=lambda: self._held_requests.leave(follow, spec.tenant, options.idempotency_key),
            timelines=self._timelines,
        )

    def _note_read(self, caller: Caller) -> None:
        if caller.arrived_at:
            self._timelines.span(caller.request_id, "read", caller.arrived_at)

    def _note_prepared(
        self, rid: str, prepared: PrepareResponse, began: float, asked: Sequence[str]
    ) -> None:
        """Preprocess says how long its parts took. They are the end of the call; texts and media are worked on side by
        side."""
        now, times, note = monotonic(), prepared.times, self._timelines.span
        fetch_s, media_s = times.fetch_us / 1e6, times.media_us / 1e6
        tokenize_s = times.tokenize_us / 1e6
        whose = {"service": "preprocess", "replica": asked[-1]}
        note(rid, "prepare", began, now, replicas=len(asked), **whose)
        since = max(began, now - max(tokenize_s, fetch_s + media_s))
        note(rid, "tokenize", since, since + tokenize_s, **whose)
        if prepared.media:
            items, cached = len(prepared.media), prepared.cached_media
            note(rid, "fetch", since, since + fetch_s, **whose)
            since += fetch_s
            note(rid, "decode_media", since, since + media_s, **whose, items=items, cached=cached)


def _names(about: PrepareRequest | RequestSpec) -> dict[str, str]:
    return names(about.request_id, about.client_request_id, about.traceparent)
