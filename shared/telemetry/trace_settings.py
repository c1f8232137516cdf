"""Where traces are exported to, as OpenTelemetry's variables say it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Where and how traces are exported, by OpenTelemetry's own variables."""

    endpoint: str
    protocol: str  # grpc or http/protobuf
    headers: tuple[tuple[str, str], ...] = field(repr=False)
    timeout_s: float
    service_name: str
    resource: tuple[tuple[str, str], ...]
    sampler: str
    sampler_argument: str


def read_trace_settings(environment: Mapping[str, str]) -> TraceSettings | None:
    """What the `OTEL_*` variables say of traces; None where they name no endpoint, or turn them off.

    Source: OpenTelemetry specification 1.50, "Environment variable specification" and "OTLP exporter".
    """
    said = environment.get
    exporter = "OTEL_EXPORTER_OTLP"

    def of_traces(name: str, default: str = "") -> str:
        return said(f"{exporter}_TRACES_{name}") or said(f"{exporter}_{name}") or default

    endpoint = of_traces("ENDPOINT")
    if (
        not endpoint
        or said("OTEL_SDK_DISABLED", "").strip().lower() == "true"
        or (said("OTEL_TRACES_EXPORTER") or "otlp") != "otlp"
    ):
        return None
    protocol = of_traces("PROTOCOL", "grpc")
    if protocol != "grpc" and not said(f"{exporter}_TRACES_ENDPOINT"):
        endpoint = f"{endpoint.rstrip('/')}/v1/traces"
    try:
        timeout_s = float(of_traces("TIMEOUT", "10000")) / 1000
    except ValueError:
        timeout_s = 10.0
    resource = dict(_named_values(said("OTEL_RESOURCE_ATTRIBUTES", "")))
    name = said("OTEL_SERVICE_NAME") or resource.pop("service.name", "tessera")
    return TraceSettings(
        endpoint=endpoint,
        protocol=protocol,
        headers=tuple(_named_values(of_traces("HEADERS"))),
        timeout_s=timeout_s,
        service_name=name,
        resource=tuple(resource.items()),
        sampler=said("OTEL_TRACES_SAMPLER") or "parentbased_always_on",
        sampler_argument=said("OTEL_TRACES_SAMPLER_ARG", ""),
    )


def _named_values(text: str) -> Iterable[tuple[str, str]]:
    """name=value, separated by commas, values in percent encoding (W3C Baggage)."""
    for pair in text.split(","):
        name, sign, value = pair.partition("=")
        if sign and name.strip():
            yield name.strip(), unquote(value.strip())
