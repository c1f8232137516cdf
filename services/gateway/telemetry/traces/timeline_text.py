"""A timeline in words: what its parts are called, and what a request waited for in them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

_Attributes = Sequence[Mapping[str, Any]]

_CALLED = {
    "read": "reading the request",
    "reserve": "reserving its place",
    "prepare": "preparing the prompt",
    "fetch": "fetching media",
    "decode_media": "decoding media",
    "tokenize": "template and tokenizer",
    "admit": "admitting it",
    "queue": "waiting in the queue",
    "schedule": "waiting at a decoder",
    "encode": "the vision encoder",
    "encode_queue": "waiting at the vision encoder",
    "encode_compute": "computing embeddings",
    "prefill": "computing the prompt",
    "preempted": "preemption",
    "decode": "generating tokens",
    "takeover": "a takeover",
    "pause": "a pause",
    "log": "writing the log",
    "deliver": "delivery to the client",
    "other": "what nobody has written of",
}
# At the decoder; the rest is planning and messages.
_STEP_PARTS = {
    "queue": "waiting for the step before",
    "prepare": "preparing",
    "forward": "the model",
    "sample": "choosing tokens",
}


class _Largest(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def duration_ms(self) -> float: ...
    @property
    def share(self) -> float: ...
    @property
    def waited_for(self) -> str: ...


def called(name: str) -> str:
    """A part in words."""
    return _CALLED.get(name, name)


def summary(
    state: str,
    total_ms: float,
    parts: Mapping[str, float],
    largest: _Largest | None,
    notes: Sequence[str],
    refusal: Mapping[str, Any] | None = None,
    failure: Mapping[str, Any] | None = None,
) -> str:
    """A few sentences. `refusal` is what is said of a request that was not accepted, `failure` of the end of one that
    ended with an error."""
    if refusal is not None:
        lines = [f"The request was refused after {_ms(total_ms)}, {_refused(refusal)}."]
    elif failure is not None:
        why = f"{failure['status']} {failure['finish'].lower()}"
        lines = [f"The request failed after {_ms(total_ms)}: {why}."]
    else:
        took = "took" if state == "ended" else f"is {state} and has taken"
        lines = [f"The request {took} {_ms(total_ms)}."]
    if largest is not None:
        lines[0] += (
            f" The largest part was {called(largest.name)}: {_ms(largest.duration_ms)}"
            f" ({largest.share:.0%}); it waited for {largest.waited_for}."
        )
    others = [f"{called(name)} {_ms(ms)}" for name, ms in list(parts.items())[1:5] if ms >= 0.05]
    if others:
        lines.append(f"Then: {', '.join(others)}.")
    return "\n".join([*lines, *(f"Note: {note}." for note in notes)])


def _refused(refusal: Mapping[str, Any]) -> str:
    where = called(refusal["where"])
    if refusal["error"] == "CLIENT_GONE":
        return f"in {where}: its client left"
    field = f" of {refusal['field']}" if "field" in refusal else ""
    why = f" ({refusal['why']})" if "why" in refusal else ""
    return f"in {where}: {refusal['status']} {refusal['error'].lower()}{field}{why}"


def waited_for(name: str, spans: _Attributes) -> str:
    """What a request waited for in a part, of the attributes of its spans."""
    found = _REASONS.get(name)
    return found(spans) if found is not None else "this step itself"


def _ms(ms: float) -> str:
    return f"{ms / 1000:.3f} s" if ms >= 1000 else f"{ms:.1f} ms"


def _schedule(spans: _Attributes) -> str:
    first = spans[0] if spans else {}
    running, waiting = first.get("running", 0), first.get("waiting", 0)
    if not first.get("free_slots", 1):
        return f"a slot: {running} sequences ran at the decoder and {waiting} waited before it"
    if waiting:
        return f"blocks of the KV cache: {first.get('free_blocks', 0)} were free, {waiting} sequences waited before it"
    return f"its turn in a step beside {running} running sequences, or for its media"


def _prefill(spans: _Attributes) -> str:
    tokens = sum(int(span.get("tokens", 0)) for span in spans)
    cached = max((int(span.get("cached_tokens", 0)) for span in spans), default=0)
    again = (
        " again, after a preemption or takeover" if any(s.get("recomputed") for s in spans) else ""
    )
    beside = max((int(span.get("step_rows", 1)) for span in spans), default=1) - 1
    return (
        f"the model to compute {tokens} tokens of its prompt{again} in {len(spans)} steps ({cached} more were cached),"
        f" beside up to {beside} other sequences"
    )


def _decode(spans: _Attributes) -> str:
    tokens = sum(int(span.get("tokens", 0)) for span in spans)
    known = [span for span in spans if span.get("steps")]
    if not known:
        return "its tokens, one after the other"
    longest = max(known, key=lambda span: span["steps"])
    parts = {name: longest[f"{name}_ms"] for name in _STEP_PARTS}
    most = max(parts, key=lambda name: parts[name])
    return (
        f"{tokens} tokens, one after the other: {longest['steps']} steps of {longest['step_ms']:.2f} ms in the mean, of"
        f" which {_STEP_PARTS[most]} took {parts[most]:.2f} ms, with {longest['step_tokens']:.1f} tokens of all"
        " sequences in a step"
    )


def _encode_compute(spans: _Attributes) -> str:
    items = max((int(span.get("batch_items", 1)) for span in spans), default=1)
    return f"the tower, which had up to {items} items at once"


def _takeover(spans: _Attributes) -> str:
    why = spans[0].get("why", "") if spans else ""
    return f"another scheduler or decoder to go on with it: {why}"


def _preempted(spans: _Attributes) -> str:
    swapped = sum(bool(span.get("swapped")) for span in spans)
    how = f"{swapped} of {len(spans)} times its blocks were swapped to host memory"
    return f"blocks of the KV cache, which others had been given ({how}, else computed again)"


def _prepare(spans: _Attributes) -> str:
    asked = max((int(span.get("replicas", 1)) for span in spans), default=1)
    return f"a preprocess to take the prompt, of which {asked} were asked"


def _said(text: str) -> Callable[[_Attributes], str]:
    return lambda _: text


_REASONS: dict[str, Callable[[_Attributes], str]] = {
    "read": _said("the client to send its body, and for that to be read"),
    "reserve": _said("Redis to reserve its place"),
    "prepare": _prepare,
    "fetch": _said("the servers of its media"),
    "decode_media": _said("its media to be decoded and made pixel values"),
    "tokenize": _said("chat template and tokenizer"),
    "admit": _said("Redis to admit it"),
    "queue": _said("a scheduler with a place at a decoder: those that were before it had them all"),
    "schedule": _schedule,
    "encode": _said("a vision encoder to answer"),
    "encode_queue": _said("the tower of the vision encoder, which had others"),
    "encode_compute": _encode_compute,
    "prefill": _prefill,
    "preempted": _preempted,
    "decode": _decode,
    "takeover": _takeover,
    "pause": _said("a token: nothing came for a while"),
    "log": _said("Redis to write its tokens"),
    "deliver": _said("the client to read what was generated, or the gateway to send it"),
    "other": _said("something that no service writes down, such as messages between them"),
}
