"""One scheduler process of the simulation: a router, its decoders, and the events between them."""

import heapq
import resource
import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from benchmarks.simulator.costs import EVERY, RequestCosts, StepCosts, clock
from benchmarks.simulator.decoder import SimulatedDecoder, Timing
from benchmarks.simulator.encoders import SimulatedEncoders
from benchmarks.simulator.policies import POLICIES
from benchmarks.simulator.prompt import sequence_of
from benchmarks.simulator.trace import Arrival
from services.scheduler.core.blocks import extend_hashes
from services.scheduler.core.budget import Capacity
from services.scheduler.core.plan import StepOutput, StepPlan, StepProgress
from services.scheduler.core.sequence import Sequence

_LEAD, _DONE, _ENCODED, _FETCHED = range(4)
_READY_TO_START = 16  # as the dispatcher: requests beyond those running that a decoder is given


@dataclass(frozen=True)
class ShardOptions:
    """Decoders of one shard."""

    decoders: int = 10
    capacity: Capacity = field(default_factory=lambda: Capacity(2049, 16, 64, 4096, 1024))
    timing: Timing = field(default_factory=Timing)
    step_target_s: float = 0.25  # the scheduler's default
    policy: str = "affinity"
    encoders: int = 4
    encoder_cache: int = 2_000


@dataclass
class ShardOutcome:
    """What came of a shard. Times are virtual seconds, but for `cpu_s` and costs, which are this machine's."""

    ttft: "array[float]" = field(default_factory=lambda: array("f"))
    tpot: "array[float]" = field(default_factory=lambda: array("f"))
    requests: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    sequence_steps: int = 0
    encodes: int = 0
    encoder_hits: int = 0
    leaks: list[str] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)  # of each decoder
    ended_at: float = 0.0
    step_costs: StepCosts = field(default_factory=StepCosts)
    request_costs: RequestCosts = field(default_factory=RequestCosts)
    cpu_s: float = 0.0  # of the whole shard, the simulation itself included
    memory_mb: float = 0.0  # the most that its process had


class Shard:
    """Runs in windows: `run` takes what arrives in a window and stops at its end."""

    def __init__(self, options: ShardOptions) -> None:
        self._options = options
        self._policy = POLICIES[options.policy]()
        self._decoders = [
            SimulatedDecoder(options.capacity, options.timing, options.step_target_s)
            for _ in range(options.decoders)
        ]
        for decoder in self._decoders:
            self._policy.add(decoder)
        self._encoders = SimulatedEncoders(options.encoders, options.encoder_cache)
        self._events: list[tuple[float, int, int, SimulatedDecoder, bytes]] = []
        self._order = 0  # of events at the same time
        self._live = 0
        self.outcome = ShardOutcome()

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return self._live

    @property
    def is_idle(self) -> bool:
        """Nothing will happen any more unless something arrives."""
        return not self._events

    @property
    def num_startable(self) -> int:
        """How many requests it would take from the queue now, by the dispatcher's rule."""
        slots = self._options.capacity.max_slots
        startable = 0
        for decoder in self._decoders:
            core = decoder.core
            free = slots - core.state.num_sequences
            if free > 0:
                startable += max(0, min(free, _READY_TO_START - core.state.num_ready_to_start))
        return startable

    def run(self, arrivals: Iterable[Arrival], begin: float, until: float) -> None:
        """Works through a window. Who arrived before `begin` was held up in the queue and comes now."""
        events, started = self._events, time.thread_time()
        for arrival in arrivals:
            now = max(begin, arrival.at)
            while events and events[0][0] <= now:
                self._happen()
            self._arrive(arrival, now)
        while events and events[0][0] <= until:
            self._happen()
        self.outcome.cpu_s += time.thread_time() - started

    def finish(self) -> ShardOutcome:
        """The outcome, once nothing is live."""
        outcome = self.outcome
        for number, decoder in enumerate(self._decoders):
            core = decoder.core
            outcome.preemptions += core.state.preemptions
            outcome.steps += core.state.steps
            outcome.sequence_steps += decoder.sequence_steps
            outcome.busy_s.append(decoder.busy_s)
            for what, count in (
                ("sequences", core.state.num_sequences),
                ("waiting", len(core.state.waiting)),
                ("running", len(core.state.running)),
                ("blocks", core.state.blocks.num_used),
                ("plans", len(core.state.in_flight)),
            ):
                if count:
                    outcome.leaks.append(f"decoder {number}: {count} {what}")
        outcome.memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        outcome.encodes, outcome.encoder_hits = self._encoders.encodes, self._encoders.hits
        return outcome

    # Events

    def _push(self, at: float, kind: int, decoder: SimulatedDecoder, digest: bytes = b"") -> None:
        self._order += 1
        heapq.heappush(self._events, (at, self._order, kind, decoder, digest))

    def _happen(self) -> None:
        now, _, kind, decoder, digest = heapq.heappop(self._events)
        if kind == _DONE:
            self._complete(decoder, now)
        elif kind == _ENCODED:
            decoder.core.embeddings_encoded(digest, digest)
        elif kind == _FETCHED:
            decoder.core.embeddings_ready(digest)
        self._pump(decoder, now)

    def _arrive(self, arrival: Arrival, now: float) -> None:
        sequence = sequence_of(arrival)
        self.outcome.requests += 1
        enter = self._enter_measured if self.outcome.requests % EVERY == 1 else self._enter
        decoder = enter(sequence)
        if decoder is None:
            self.outcome.refused += 1
            return
        self._live += 1
        self._pump(decoder, now)

    def _enter(self, sequence: Sequence) -> SimulatedDecoder | None:
        """Gives a sequence to a decoder; None if it can never run there."""
        decoder = self._policy.choose(sequence)
        return decoder if decoder.core.add(sequence) is None else None

    def _enter_measured(self, sequence: Sequence) -> SimulatedDecoder | None:
        began = clock()
        extend_hashes(sequence, self._options.capacity)
        hashed = clock()
        decoder = self._policy.choose(sequence)
        routed = clock()
        ending = decoder.core.add(sequence)
        self.outcome.request_costs.add(hashed - began, routed - hashed, clock() - routed)
        return decoder if ending is None else None

    def _pump(self, decoder: SimulatedDecoder, now: float) -> None:
        """As the real link does: one plan ahead, sent shortly before the running step ends."""
        core = decoder.core
        while decoder.num_plans < 2:
            if decoder.num_plans:
                due = decoder.ends_at - decoder.timing.lead_s
                if now < due:
                    if decoder.wake_at != due:
                        decoder.wake_at = due
                        self._push(due, _LEAD, decoder)
                    break
            plan = self._plan(decoder)
            if plan is None:
                break
            for digest in plan.fetch:
                self._push(now + decoder.timing.fetch_s, _FETCHED, decoder, digest)
            if decoder.send(plan, now):
                self._push(decoder.ends_at, _DONE, decoder)
        for span in core.state.media.take_wanted():
            ready = self._encoders.encode(span.digest, span.payload, now)
            self._push(ready, _ENCODED, decoder, span.digest)
        core.state.media.take_released()

    def _plan(self, decoder: SimulatedDecoder) -> StepPlan | None:
        core = decoder.core
        if core.state.steps % EVERY:
            return core.plan()
        began = clock()
        plan = core.plan()
        decoder.planning_s += clock() - began
        return plan

    def _complete(self, decoder: SimulatedDecoder, now: float) -> None:
        plan, output = decoder.finish(now)
        if decoder.num_plans:
            self._push(decoder.ends_at, _DONE, decoder)
        if plan.step % EVERY == 1:
            progress = self._complete_measured(decoder, plan, output)
        else:
            progress = decoder.core.complete(output)
        for sequence in decoder.answered(progress, now):
            self._end(sequence, now)

    def _complete_measured(
        self, decoder: SimulatedDecoder, plan: StepPlan, output: StepOutput
    ) -> StepProgress:
        began = clock()
        progress = decoder.core.complete(output)
        took = clock() - began + decoder.planning_s
        decoder.planning_s = 0.0
        generating = plan.row_count.count(1)
        prompts = len(plan.row_count) - generating
        self.outcome.step_costs.add(took, generating, prompts, len(progress.endings))
        return progress

    def _end(self, sequence: Sequence, now: float) -> None:
        flight, outcome = sequence.payload, self.outcome
        self._live -= 1
        outcome.ttft.append(flight.first - flight.came)
        count = sequence.num_output_tokens
        if count > 1:
            outcome.tpot.append((now - flight.first) / (count - 1))
        outcome.prompt_tokens += sequence.prompt_len
        outcome.cached_tokens += sequence.num_cached_tokens
        outcome.output_tokens += count
        outcome.ended_at = now
