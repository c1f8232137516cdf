"""One request's timeline: spans of all services by one clock, and where most of its time went."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec

from services.gateway.telemetry.traces import timeline_text
from shared.queue.stores.timeline_store import KeptTimeline
from shared.telemetry.request_names import trace_of


class Span(msgspec.Struct):
    """Something that took time, or a moment (0 ms). Times are milliseconds since the request's begin."""

    name: str
    service: str
    replica: str
    start_ms: float
    duration_ms: float
    attributes: dict[str, Any]

    @property
    def end_ms(self) -> float:
        """When it was over."""
        return self.start_ms + self.duration_ms


class Largest(msgspec.Struct):
    """The part of a request that most of its time was."""

    name: str
    service: str
    duration_ms: float
    share: float  # of the whole
    waited_for: str


class RequestTimeline(msgspec.Struct):
    """What the API shows. `notes` say what is missing; `parts` are milliseconds by name, each moment counted once."""

    request_id: str
    trace_id: str
    model: str
    started: float  # seconds since 1970, by the clock of Redis
    duration_ms: float
    state: str
    spans: list[Span]
    largest: Largest | None
    parts: dict[str, float]
    notes: list[str]
    clock_error_ms: float
    text: str


# Of spans that are open at a moment the first one here has it: what others wait for meanwhile is this.
_ORDER = (
    *("takeover", "preempted", "prefill", "encode_compute", "encode_queue", "encode"),
    *("fetch", "decode_media", "tokenize", "prepare", "reserve", "admit", "read"),
    *("decode", "schedule", "queue", "pause", "log", "deliver"),
)
_RANKS = {name: rank for rank, name in enumerate(_ORDER)}
OTHER = "other"


@dataclass(slots=True)
class _Raw:
    """A span as it was written: microseconds by the clock of Redis."""

    name: str
    service: str
    replica: str
    start: int
    end: int
    attributes: dict[str, Any]
    writer: str = ""  # the replica that wrote it


@dataclass(slots=True)
class _Read:
    """All that was written of a request."""

    spans: list[_Raw] = field(default_factory=list)
    left_out: int = 0
    clock_error_us: int = 0

    def named(self, *names: str) -> list[_Raw]:
        """Those with one of the names, in their order."""
        return [span for span in self.spans if span.name in names]


def timeline_of(request_id: str, kept: KeptTimeline) -> RequestTimeline:
    """The timeline of what is kept of a request."""
    read = _read(kept)
    notes = _notes(read, kept)
    read.spans += [*_takeovers(read), *_wait_without_end(read, kept)]
    read.spans.sort(key=lambda span: (span.start, -span.end))
    arrived = 1000 * kept.arrived_ms
    start = min((span.start for span in read.spans), default=arrived)
    end = max((span.end for span in read.spans), default=max(start, 1000 * kept.ended_ms))
    parts = _parts(read.spans, start, end)
    spans = [
        Span(
            span.name,
            span.service,
            span.replica,
            round((span.start - start) / 1000, 3),
            round((span.end - span.start) / 1000, 3),
            span.attributes,
        )
        for span in read.spans
    ]
    refusal = next((span.attributes for span in spans if span.name == "refused"), None)
    ends = [span.attributes for span in spans if span.name == "end"]
    failure = ends[-1] if ends and "status" in ends[-1] else None
    total_ms = (end - start) / 1000
    largest = _largest(parts, spans, total_ms)
    return RequestTimeline(
        request_id=request_id,
        trace_id=trace_of(request_id, kept.head.traceparent),
        model=kept.head.model,
        started=start / 1e6,
        duration_ms=round(total_ms, 3),
        state=kept.state,
        spans=spans,
        largest=largest,
        parts=parts,
        notes=notes,
        clock_error_ms=round(read.clock_error_us / 1000, 3),
        text=timeline_text.summary(kept.state, total_ms, parts, largest, notes, refusal, failure),
    )


def _read(kept: KeptTimeline) -> _Read:
    read = _Read(left_out=kept.left_out)
    for data in kept.chunks:
        chunk = json.loads(data)
        read.left_out += chunk["left_out"]
        read.clock_error_us = max(read.clock_error_us, chunk["clock_error_us"])
        for name, start, duration, attributes, service, replica in chunk["spans"]:
            # The queue is nobody's work: it has no replica.
            by = replica if service else chunk["replica"]
            read.spans.append(
                _Raw(
                    name,
                    service or chunk["service"],
                    by,
                    start,
                    start + duration,
                    _shown(attributes),
                    chunk["replica"],
                )
            )
    read.spans.sort(key=lambda span: (span.start, -span.end))
    return read


def _shown(attributes: dict[str, Any]) -> dict[str, Any]:
    """Attributes as people read them: durations are written as whole microseconds."""
    return {
        f"{name.removesuffix('_us')}_ms" if name.endswith("_us") else name: value / 1000
        if name.endswith("_us")
        else value
        for name, value in attributes.items()
    }


def _notes(read: _Read, kept: KeptTimeline) -> list[str]:
    """What is missing, and why."""
    notes = []
    takes = read.named("take")
    if kept.attempts > len(takes):
        missing = kept.attempts - len(takes)
        notes.append(
            f"{missing} of {kept.attempts} takings left nothing: the scheduler was lost before it had written"
        )
    ended = {span.writer for span in read.named("left_decoder", "ended", "given_back")}
    for span, following in pairwise(takes):
        if span.writer not in ended and span.writer != following.writer:
            notes.append(
                f"scheduler {span.writer[:8]} was lost: what it did in its last half second is missing"
            )
    if kept.state == "ended" and not read.named("end"):
        notes.append("no gateway has written the end of the delivery: it is lost, or still writing")
    if read.left_out:
        notes.append(f"{read.left_out} events are left out: there were too many")
    return notes


def _takeovers(read: _Read) -> Iterator[_Raw]:
    """From the loss of a request, or its return, to when it was taken again; and what a lost scheduler computed, as far
    as others have seen it."""
    takes = read.named("take")
    for earlier, take in pairwise(takes):
        before = [
            span
            for span in read.spans
            if earlier.start <= span.start <= take.start
            and span.service not in ("gateway", "queue")
            and span.name != "log"
            and span is not take
        ]
        left = next((span for span in before if span.name == "left_decoder"), None)
        if left is not None:
            lost = left.start
        else:
            lost = max((min(span.end, take.start) for span in before), default=earlier.start)
            pauses = [p for p in read.named("pause") if lost <= p.end and p.start <= take.start]
            seen = max((pause.start for pause in pauses), default=lost)
            if seen > lost and read.named("first_token"):
                yield _Raw("decode", "decoder", "", lost, seen, {"inferred": True})
            lost = max(lost, seen)
        why = "its scheduler was lost" if left is None else left.attributes["why"]
        yield _Raw(
            "takeover",
            "queue",
            "",
            lost,
            take.start,
            {
                "attempt": take.attributes.get("attempt"),
                "tokens": take.attributes.get("tokens"),
                "why": why,
            },
        )


def _wait_without_end(read: _Read, kept: KeptTimeline) -> Iterator[_Raw]:
    """The time in the queue of a request that has ended there: who takes a request writes it, and nobody did."""
    admitted, ends = read.named("admit"), read.named("end")
    if admitted and ends and not kept.attempts:
        yield _Raw("queue", "queue", "", admitted[-1].end, ends[-1].start, {"inferred": True})


def _parts(spans: Sequence[_Raw], start: int, end: int) -> dict[str, float]:
    """Milliseconds by name, the longest first. Each moment counts for the first open span of `_ORDER`."""
    events: list[tuple[int, int, int]] = []
    for span in spans:
        rank = _RANKS.get(span.name)
        if rank is not None and span.end > span.start:
            events += ((span.start, 1, rank), (span.end, -1, rank))
    events.sort()
    found: dict[str, int] = {}
    is_open = [0] * len(_ORDER)
    last = start
    for at, change, rank in [*events, (end, 0, 0)]:
        if at > last:
            first = next((r for r, count in enumerate(is_open) if count), None)
            name = OTHER if first is None else _ORDER[first]
            found[name] = found.get(name, 0) + at - last
            last = at
        is_open[rank] += change
    ordered = sorted(found.items(), key=lambda item: -item[1])
    return {name: round(us / 1000, 3) for name, us in ordered}


def _largest(parts: dict[str, float], spans: Sequence[Span], total_ms: float) -> Largest | None:
    if not parts or total_ms <= 0:
        return None
    name, duration_ms = next(iter(parts.items()))
    of = [span for span in spans if span.name == name and span.duration_ms]
    return Largest(
        name=name,
        service=of[0].service if of else "",
        duration_ms=duration_ms,
        share=round(duration_ms / total_ms, 4),
        waited_for=timeline_text.waited_for(name, [span.attributes for span in of]),
    )
