"""One scheduler process of the simulation: a router, its decoders, and the events between them."""

import gc
import heapq
import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from benchmarks.simulator.decoder import Flight, SimulatedDecoder, Timing
from benchmarks.simulator.encoders import SimulatedEncoders
from benchmarks.simulator.policies import POLICIES
from benchmarks.simulator.trace import Arrival
from services.scheduler.core.block_hash import extend_hashes
from services.scheduler.core.scheduler import Capacity
from services.scheduler.core.sequence import MediaSpan, Sequence

_LEAD, _DONE, _ENCODED, _FETCHED = range(4)
_READY_TO_START = 16  # as the dispatcher: requests beyond those running that a decoder is given
_PLACEHOLDER = 3
_PREFIX_BASE = 1 << 30  # first token id of prefixes; own tokens count up from 100
_LAST_OWN = _PREFIX_BASE - (1 << 20)


@dataclass(frozen=True)
class ShardOptions:
    """Decoders of one shard."""

    decoders: int = 10
    capacity: Capacity = field(default_factory=lambda: Capacity(2049, 16, 64, 4096, 1024))
    timing: Timing = field(default_factory=Timing)
    policy: str = "affinity"
    encoders: int = 4
    encoder_cache: int = 2_000


@dataclass
class ShardOutcome:
    """What came of a shard. Times are virtual seconds, but for `*_cpu_s`, which are this machine's."""

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
    hash_cpu_s: float = 0.0
    route_cpu_s: float = 0.0
    add_cpu_s: float = 0.0
    core_cpu_s: float = 0.0


class Shard:
    """Runs in windows: `run` takes what arrives in a window and stops at its end."""

    def __init__(self, options: ShardOptions) -> None:
        self._options = options
        self._policy = POLICIES[options.policy]()
        self._decoders = [
            SimulatedDecoder(options.capacity, options.timing) for _ in range(options.decoders)
        ]
        for decoder in self._decoders:
            self._policy.add(decoder)
        self._encoders = SimulatedEncoders(options.encoders, options.encoder_cache)
        self._events: list[tuple[float, int, int, SimulatedDecoder, bytes]] = []
        self._order = 0  # of events at the same time
        self._own_token = 100
        self._live = 0
        self.outcome = ShardOutcome()
        gc.disable()  # nothing here is cyclic, and there are millions of objects to look through

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return self._live

    @property
    def room(self) -> int:
        """How many requests it would take from the queue now, by the dispatcher's rule."""
        slots = self._options.capacity.max_slots
        room = 0
        for decoder in self._decoders:
            core = decoder.core
            free = slots - core.num_sequences
            if free > 0:
                room += max(0, min(free, _READY_TO_START - core.num_ready_to_start))
        return room

    def run(self, arrivals: Iterable[Arrival], begin: float, until: float) -> None:
        """Works through a window. Who arrived before `begin` was held up in the queue and comes now."""
        events = self._events
        for arrival in arrivals:
            now = max(begin, arrival.at)
            while events and events[0][0] <= now:
                self._happen()
            self._arrive(arrival, now)
        while events and events[0][0] <= until:
            self._happen()

    def finish(self) -> ShardOutcome:
        """The outcome, once nothing is live."""
        outcome = self.outcome
        for number, decoder in enumerate(self._decoders):
            core = decoder.core
            outcome.preemptions += core.preemptions
            outcome.steps += core.steps
            outcome.sequence_steps += decoder.sequence_steps
            outcome.busy_s.append(decoder.busy_s)
            for what, count in (
                ("sequences", core.num_sequences),
                ("waiting", len(core.waiting)),
                ("running", len(core.running)),
                ("blocks", core.blocks.num_used),
                ("plans", core.num_in_flight),
            ):
                if count:
                    outcome.leaks.append(f"decoder {number}: {count} {what}")
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
        sequence = self._sequence(arrival)
        self.outcome.requests += 1
        began = time.thread_time()
        extend_hashes(sequence, self._options.capacity.block_size)
        hashed = time.thread_time()
        decoder = self._policy.choose(sequence)
        routed = time.thread_time()
        ending = decoder.core.add(sequence)
        self.outcome.add_cpu_s += time.thread_time() - routed
        self.outcome.route_cpu_s += routed - hashed
        self.outcome.hash_cpu_s += hashed - began
        if ending is not None:
            self.outcome.refused += 1
            return
        self._live += 1
        decoder.live.append(sequence)
        decoder.unanswered.append(sequence)
        self._pump(decoder, now)

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
            began = time.thread_time()
            plan = core.plan()
            self.outcome.core_cpu_s += time.thread_time() - began
            if plan is None:
                break
            for digest in plan.fetch:
                self._push(now + decoder.timing.fetch_s, _FETCHED, decoder, digest)
            if decoder.send(plan, now):
                self._push(decoder.ends_at, _DONE, decoder)
        for span in core.media.take_wanted():
            ready = self._encoders.encode(span.digest, span.payload, now)
            self._push(ready, _ENCODED, decoder, span.digest)
        core.media.take_released()

    def _complete(self, decoder: SimulatedDecoder, now: float) -> None:
        _, output = decoder.finish(now)
        if decoder.num_plans:
            self._push(decoder.ends_at, _DONE, decoder)
        began = time.thread_time()
        decoder.core.complete(output)
        self.outcome.core_cpu_s += time.thread_time() - began
        for sequence in decoder.answered(now):
            self._end(sequence, now)

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

    def _sequence(self, arrival: Arrival) -> Sequence:
        """Prefix, pictures, own tokens. Ids that no other request has stand for text that no other has."""
        start = _PREFIX_BASE + arrival.prefix  # no two prefixes have an equal first block
        tokens = list(range(start, start + arrival.prefix_tokens))
        media = []
        for picture in arrival.pictures:
            digest = picture.number.to_bytes(16, "little")
            length = picture.tokens
            media.append(MediaSpan(digest, len(tokens), length, length, picture.encode_s))
            tokens += [_PLACEHOLDER] * length
        tokens += range(self._own_token, self._own_token + arrival.own_tokens)
        self._own_token = (self._own_token + arrival.own_tokens) % _LAST_OWN
        return Sequence(
            str(arrival.number),
            tokens,
            len(tokens),
            arrival.output_tokens,
            media=tuple(media),
            arrival=arrival.number,
            payload=Flight(arrival.at),
        )
