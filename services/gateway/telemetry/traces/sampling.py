"""Which requests have their traces exported, by OpenTelemetry's samplers."""

from collections.abc import Callable

from shared.errors import InvalidRequest
from shared.telemetry.request_names import trace_of, trace_parent

# Whether the trace of a request is exported: its id, and the trace context that its client gave.
Sampler = Callable[[str, str], bool]


def never_sampled(_: str, __: str) -> bool:
    """Where traces are not exported."""
    return False


def sampler_of(name: str, argument: str) -> Sampler:
    """The sampler that `OTEL_TRACES_SAMPLER` names, with `OTEL_TRACES_SAMPLER_ARG`. Raises InvalidRequest.

    Source: OpenTelemetry specification 1.50, environment variables, "General SDK configuration".
    """
    kind, _, own = name.rpartition("parentbased_")
    follows_parent = bool(kind) or name.startswith("parentbased_")
    ratio = {"always_on": 1.0, "always_off": 0.0}.get(own)
    if own == "traceidratio":
        ratio = _ratio(argument)
    if ratio is None:
        raise InvalidRequest(
            "BAD_SAMPLER",
            f"OTEL_TRACES_SAMPLER is {name!r}, not one of always_on, always_off, traceidratio, or these after"
            " parentbased_",
        )
    # The ratio of all trace ids whose last 56 bits, which are random, are below this.
    below = round(ratio * (1 << 56))

    def samples(request_id: str, traceparent: str) -> bool:
        parent = trace_parent(traceparent) if follows_parent and traceparent else None
        if parent is not None:
            return parent[2]
        return int(trace_of(request_id, traceparent)[-14:], 16) < below

    return samples


def _ratio(argument: str) -> float:
    try:
        ratio = float(argument or "1")
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise InvalidRequest(
            "BAD_SAMPLER", f"OTEL_TRACES_SAMPLER_ARG is {argument!r}, not a number from 0 to 1"
        )
    return ratio
