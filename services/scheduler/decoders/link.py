"""One decoder under one lease: the step stream, the core that plans for it, and the moment when a plan leaves."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import grpc.aio
import structlog

from services.scheduler.core.plan import StepOutput, StepPlan, StepProgress
from services.scheduler.core.planner import PreemptionMode
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence import Error, Policy, Sequence
from services.scheduler.decoders import convert
from services.scheduler.decoders.embedding_requests import EmbeddingRequests
from services.scheduler.decoders.move_timer import MoveTimer
from services.scheduler.decoders.step_statistics import StepStatistics
from services.scheduler.decoders.step_trace import StepTrace
from services.scheduler.encoders import Encoders
from shared.environment import monotonic
from shared.errors import ServingError, Superseded, Unavailable
from shared.net import tasks
from shared.net.channels import open_channel
from shared.net.rpc.errors import calling
from shared.queue.registry import Member
from shared.telemetry.timeline import Timelines
from tessera.decoder.v1 import decoder_pb2
from tessera.decoder.v1.decoder_pb2_grpc import DecoderServiceStub
from tessera.scheduler.v1.scheduler_pb2 import DecoderLoad

if TYPE_CHECKING:
    from services.scheduler.output.request import Request

log = structlog.get_logger(__name__)

_HEARTBEAT_S = 0.5
_SILENCE_S = 2.0
_HELLO_S = 5.0
# Ends of a stream that the decoder lives through, as it or this scheduler says.
_ORDERLY = (
    "DECODER_STOPS",
    "DECODER_EMPTIED",
    "SCHEDULER_GONE",
    "SCHEDULER_SILENT",
    "STALE_LEASE",
)
# Ends that neither side has said anything about: of the transport, and of silence.
_BROKEN = (
    "UNAVAILABLE",
    "CANCELLED",
    "DEADLINE_EXCEEDED",
    "CALL_BROKEN",
    "DECODER_GONE",
    "DECODER_SILENT",
    "LINK_FAILED",
)


class LinkEnd(Enum):
    """How a link ended."""

    ORDERLY = 1
    BROKEN = 2  # why is not known: the process may have ended, or the connection alone
    STEP_FAILED = 3  # the decoder failed a whole step, or its answer was not understood


@dataclass(slots=True)
class _SentPlan:
    """A plan that was not answered yet."""

    plan: StepPlan
    sent: float
    began: float  # when it was sent or the plan before it was answered, whichever is later


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """How each decoder is scheduled."""

    lead_s: float  # before the end of a step, when the next plan leaves
    encoder_budget: int | None  # rows of embeddings that are asked for at a time
    step_target_s: float  # that a step may take while sequences decode; 0 is any
    policy: Policy
    preemption_mode: PreemptionMode
    core: type[Scheduler] = Scheduler


# What became of an adapter at a decoder: its digest, and why it could not be read, empty where it is there.
OnAdapter = Callable[["DecoderLink", str, str], None]
OnStep = Callable[[StepProgress, StepPlan | None, decoder_pb2.StepResult | None], None]


class DecoderLink:
    """A stream to a decoder with its own `Scheduler`. It is never resumed: after a break a new link is made.

    `on_step` gets what each step gave, after the next plan has left; `on_returned` the ids of requests whose media
    nobody encodes any more as they are named.
    """

    def __init__(
        self,
        member: Member,
        lease: int,
        scheduler_id: str,
        encoders: Encoders,
        *,
        options: LinkOptions,
        on_step: OnStep,
        on_returned: Callable[[list[str]], None],
        on_adapter: OnAdapter,
        timelines: Timelines,
    ) -> None:
        self.member = member
        self.lease = lease
        self.wants_to_end = False  # the decoder says so
        self.is_given_away = False  # another scheduler has none
        self.ended = LinkEnd.ORDERLY  # valid once `run` has returned
        self._scheduler_id = scheduler_id
        self._encoders = encoders
        self._options = options
        self._on_step = on_step
        self._on_returned = on_returned
        self._on_adapter = on_adapter
        self._recomputations = 0  # that the requests know of
        self._channel = open_channel(member.address)
        self._call: Any = None
        self._outbox: asyncio.Queue[decoder_pb2.StepsRequest] = asyncio.Queue()
        self._sent: deque[_SentPlan] = deque()
        self._statistics = StepStatistics()
        self._timelines = timelines
        self.trace = StepTrace(timelines, member.instance_id, self._statistics)
        self._predicted_us = 0.0  # of the plan with rows that was sent last
        self._moves = MoveTimer()  # in microseconds
        self._wake: asyncio.TimerHandle | None = None
        self._last_message = 0.0
        self._plans_in_flight = 1
        self._stopped = False
        self._ended_because: tuple[str, str] | None = None  # reason and message, of `finish`
        self.hello = decoder_pb2.Hello()
        self.core: Scheduler
        self._media: EmbeddingRequests

    @property
    def draining(self) -> bool:
        """It gets nothing new and is emptied, for one reason or another."""
        return self.wants_to_end or self.is_given_away

    @property
    def content(self) -> str:
        """The digest of its weights in hex; empty where it is not known. Valid once it is open."""
        return self.hello.content.hex()

    @property
    def numerics(self) -> str:
        """What its bits depend on beyond model and weights. Valid once it is open."""
        return self.hello.numerics

    @property
    def in_flight_requests(self) -> set[str]:
        """Requests with rows in a plan that was not answered."""
        return {s.request_id for sent in self._sent for s in sent.plan.row_sequence}

    async def open(self) -> None:
        """Binds the decoder and learns what it is. Raises Unavailable or the decoder's refusal."""
        self._call = DecoderServiceStub(self._channel).Steps()
        opening = decoder_pb2.Open(
            decoder_id=self.member.instance_id,
            scheduler_id=self._scheduler_id,
            lease=self.lease,
        )
        try:
            async with asyncio.timeout(_HELLO_S):
                with calling("decoder"):
                    await self._call.write(decoder_pb2.StepsRequest(open=opening))
                    first = await self._call.read()
        except TimeoutError:
            raise Unavailable("DECODER_SILENT", "the decoder did not say hello") from None
        if first is grpc.aio.EOF or first.WhichOneof("message") != "hello":
            raise await self._reason()
        self.hello = first.hello
        self._plans_in_flight = max(1, self.hello.plans_in_flight)
        options = self._options
        self.core = self._options.core(
            convert.capacity_of(self.hello),
            options.encoder_budget,
            options.policy,
            options.preemption_mode,
            1e6 * options.step_target_s,
        )
        self.core.costs.announced(self.hello.step_us, self.hello.token_us)
        self.core.state.blocks.adopt(convert.sealed_of(self.hello))
        self.core.state.adapters.adopt(self.hello.loaded_adapters)
        user = f"{self.member.instance_id}/{self.lease}"  # leases of two decoders may be equal
        self._media = EmbeddingRequests(
            self.core,
            self._encoders,
            user,
            self._on_media_change,
            self._on_lost_again,
            self._on_not_encoded,
            content=self.hello.content,
            timelines=self._timelines,
        )

    async def run(self) -> None:
        """Reads results until the stream breaks, then raises why."""
        self._last_message = monotonic()
        writer = self._helper(self._write())
        watch = self._helper(self._watch())
        try:
            with calling("decoder"):
                while True:
                    response = await self._call.read()
                    if response is grpc.aio.EOF:
                        raise await self._reason()
                    self._last_message = monotonic()
                    match response.WhichOneof("message"):
                        case "result":
                            self._on_result(response.result)
                        case "heartbeat":
                            self.wants_to_end = response.heartbeat.draining
        except asyncio.CancelledError:
            if self._ended_because is None:
                raise
            # Made here: an error that the link itself held would hold the link, by its traceback.
            reason, message = self._ended_because
            self.ended = self._end_of(reason)
            raise Unavailable(reason, message) from None
        except ServingError as error:
            is_superseded = isinstance(error, Superseded)
            self.ended = LinkEnd.ORDERLY if is_superseded else self._end_of(error.reason)
            raise
        except Exception:  # what came of a step was not understood here
            self.ended = LinkEnd.STEP_FAILED
            raise
        finally:
            self._stopped = True
            if self._wake is not None:
                self._wake.cancel()
            await tasks.end(writer, watch)
            await self._media.close()

    def _end_of(self, reason: str) -> LinkEnd:
        if reason in _ORDERLY or self.wants_to_end:
            return LinkEnd.ORDERLY
        return LinkEnd.BROKEN if reason in _BROKEN else LinkEnd.STEP_FAILED

    def finish(self, reason: str, message: str) -> None:
        """Ends the stream: `run` raises why."""
        self._stopped = True
        self._ended_because = reason, message
        self._call.cancel()

    async def close(self) -> None:
        """Ends the stream."""
        self._stopped = True
        if self._call is not None:
            self._call.cancel()
        await self._channel.close()

    async def finish_steps(self, timeout_s: float) -> None:
        """Sends no more plans and waits for the answers to those under way."""
        self._stopped = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.core.state.in_flight:
                    await asyncio.sleep(0.005)

    def pump(self) -> None:
        """Sends the next plan if it is time, or arranges for it. Called after everything that may give work."""
        while not self._stopped and len(self.core.state.in_flight) < self._plans_in_flight:
            if self._sent and (wait := self._until_lead()) > 0:
                # Later is better: a request that arrives or ends until then does not wait for two long steps.
                if self._wake is None:
                    self._wake = asyncio.get_running_loop().call_later(wait, self._on_wake)
                break
            if not self._send_next():
                break
        self._media.send()

    def load(self) -> DecoderLoad:
        """What it is doing."""
        core, state = self.core, self.core.state
        return DecoderLoad(
            decoder_id=self.member.instance_id,
            address=self.member.address,
            running=len(state.running),
            waiting=len(state.waiting),
            blocks_used=state.blocks.num_used,
            blocks_total=state.blocks.num_total,
            steps=state.steps,
            prefix_queries=state.blocks.queries,
            prefix_hits=state.blocks.hits,
            preemptions=state.preemptions,
            totals=self._statistics.totals(),
            step_target_us=1e6 * self._options.step_target_s,
            step_predicted_us=self._predicted_us,
            prompt_budget=core.prompt_budget,
            read_steps=self._statistics.durations(),
            block_size=core.capacity.block_size,
            host_blocks=core.capacity.num_host_blocks,
            step_tokens=self._statistics.tokens(),
            waiting_for_media=sum(1 for s in state.waiting if not state.has_media(s)),
            running_adapters=_adapter_names(state.running),
            waiting_adapters=_adapter_names(state.waiting),
            max_adapters=len(core.capacity.adapters) + core.capacity.max_adapters,
            drafts=convert.draft_totals(core.lookahead),
        )

    def predict(self, tokens: int) -> float:
        """Seconds that a step of so many tokens takes; 0 where nothing is known of it."""
        return self.core.costs.predict(tokens) / 1e6

    @property
    def seconds_for_token(self) -> float:
        """What a token of a prompt takes in full steps; 0 where nothing is known of it."""
        full = self.core.capacity.max_batched_tokens
        return self.predict(full) / full

    # Steps

    def _send_next(self) -> bool:
        begin = monotonic()
        plan = self.core.plan()
        if self.core.state.recomputations > self._recomputations:
            self._note_recomputations()
        if plan is None:
            return False
        self._outbox.put_nowait(convert.plan_message(plan, self.lease, self.core.capacity))
        now = monotonic()
        self._sent.append(_SentPlan(plan, now, now))
        for _, sequence in plan.new:
            request: Request = sequence.payload.request
            request.begin(now)
        if plan.row_slot:
            self._predicted_us = self.core.costs.predict(plan.num_tokens, plan.num_pairs)
        self.trace.planned(plan, self.core.state)
        self._statistics.plan_s += now - begin
        return True

    def _until_lead(self) -> float:
        running = self._sent[0]
        if not running.plan.row_slot:
            return 0.0
        plan = running.plan
        predicted = self.core.costs.predict(plan.num_tokens, plan.num_pairs) / 1e6
        return running.began + predicted - self._options.lead_s - monotonic()

    def _on_wake(self) -> None:
        self._wake = None
        self.pump()

    def _on_result(self, result: decoder_pb2.StepResult) -> None:
        if result.lease != self.lease:
            return
        plan, progress, began, ended = None, StepProgress(), 0.0, 0.0
        if result.step:  # 0 answers no plan: it only says what became of artifacts or adapters
            answered = self._sent[0]
            plan, now = answered.plan, monotonic()
            began, ended = answered.began, now
            output = convert.output_of(plan, result)
            self._learn(plan, output, now - began, result.times)
            self._statistics.add(plan, now - answered.sent, now - answered.began, result.times)
            progress = self.core.complete(output)
            self._sent.popleft()
            if self._sent:  # the next one began then
                self._sent[0].began = now
            self._statistics.plan_s += monotonic() - now
        for digest in result.artifacts_ready:
            self._media.ready(digest)
        for digest in result.artifacts_lost:
            progress.extend(self._media.lost(digest))
        for outcome in result.adapters:
            progress.extend(self._on_outcome(outcome))
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        self.pump()
        begin = monotonic()
        if plan is not None:
            self.trace.answered(plan, began, ended, result.times)
        self._on_step(progress, plan, result)
        self._statistics.log_s += monotonic() - begin

    def _learn(
        self, plan: StepPlan, output: StepOutput, seconds: float, times: decoder_pb2.StepTimes
    ) -> None:
        """Keeps the estimates of what steps, tokens and moves of blocks take. A step is what a client waits for, by the
        clock here: what the decoder says of it lacks the way."""
        if plan.num_tokens:
            self.core.learn(plan, output, 1e6 * seconds)
        if plan.num_swapped or self._moves.is_begun:
            self._moves.observe(plan.num_swapped, times.prepare_us)
            self.core.costs.of_block = self._moves.of_block

    def _note_recomputations(self) -> None:
        state = self.core.state
        self._recomputations = state.recomputations
        for sequence in (*state.running, *state.waiting):
            if sequence.was_recomputed and sequence.payload is not None:
                sequence.payload.request.computes_again()

    # Adapters

    def read_early(self, lora_id: str, folder: str) -> None:
        """Has an adapter read before a request asks for it, where there is a place that none needs."""
        adapters = self.core.state.adapters
        if adapters.has(lora_id):
            self._on_adapter(self, lora_id, "")
        elif not self.core.capacity.max_adapters:
            self._on_adapter(
                self,
                lora_id,
                f"the decoder at {self.hello.host} reads no adapters while it runs: start it with"
                " --allowed-adapter-dir",
            )
        else:
            adapters.read_early(lora_id, folder)
            self.pump()

    def _on_outcome(self, outcome: decoder_pb2.AdapterOutcome) -> StepProgress:
        lora_id, why = outcome.lora_id, outcome.failure
        self._on_adapter(self, lora_id, why.message)
        if outcome.HasField("failure"):
            return self.core.adapter_failed(lora_id, Error(why.reason, why.message, why.code))
        self.core.adapter_loaded(lora_id)
        return StepProgress()

    # Media

    def _on_not_encoded(self, request_ids: list[str]) -> None:
        self._on_returned(request_ids)
        self.pump()

    def _on_media_change(self, progress: StepProgress | None) -> None:
        self.pump()
        if progress is not None:
            self._on_step(progress, None, None)

    def _on_lost_again(self, digest: bytes) -> None:
        if not self._stopped:
            self._on_media_change(self.core.embeddings_lost(digest))

    # Stream

    async def _write(self) -> None:
        while True:
            await self._call.write(await self._outbox.get())

    async def _watch(self) -> None:
        """Sends heartbeats, and ends the stream when the decoder has been silent too long."""
        while monotonic() - self._last_message < _SILENCE_S:
            self._outbox.put_nowait(
                decoder_pb2.StepsRequest(heartbeat=decoder_pb2.Heartbeat(draining=False))
            )
            before = monotonic()
            await asyncio.sleep(_HEARTBEAT_S)
            now = monotonic()
            if now - before > _SILENCE_S / 2:
                self._last_message = (
                    now  # this process slept: what was sent meanwhile is still unread
                )
        self.finish("DECODER_SILENT", f"the decoder was silent for {_SILENCE_S:.0f} s")

    def _helper(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        task.add_done_callback(self._on_helper_done)
        return task

    def _on_helper_done(self, task: "asyncio.Task[None]") -> None:
        """No caller awaits these: without the writer or the watch the decoder would stand idle."""
        if task.cancelled() or self._stopped or self._call.done():
            return  # the reader says why
        error = task.exception()
        if error is not None:
            log.error("a link has failed", decoder=self.member.instance_id, error=repr(error)[:500])
            self.finish("LINK_FAILED", f"the link failed: {type(error).__name__}")

    async def _reason(self) -> ServingError:
        """Why the decoder ended the stream."""
        try:
            with calling("decoder"):
                code = await self._call.code()
                details = await self._call.details()
        except ServingError as error:
            return error
        if code is grpc.StatusCode.ABORTED:
            return Superseded("LEASE_LOST", details or "a newer scheduler has the decoder")
        return Unavailable("DECODER_GONE", details or f"the stream ended: {code}")


def _adapter_names(sequences: Iterable[Sequence]) -> list[str]:
    """Of the adapters that sequences have, as their requests named them."""
    adapted = (s for s in sequences if s.lora_id and s.payload is not None)
    return sorted({s.payload.request.spec.model for s in adapted})
