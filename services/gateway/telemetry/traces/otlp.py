"""Timelines as traces of OpenTelemetry: the messages of OTLP, and how they are sent.

Imported only where traces are exported: it needs the extra `otel`.
Sources: opentelemetry-proto 1.9, and the semantic conventions 1.40 for generative AI (`gen_ai.*`).
"""

import asyncio
import hashlib
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import (
    AnyValue,
    ArrayValue,
    InstrumentationScope,
    KeyValue,
)
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from services.gateway.telemetry.traces.request_timeline import RequestTimeline
from services.gateway.telemetry.traces.request_timeline import Span as Seen
from shared.telemetry.request_names import trace_parent
from shared.telemetry.trace_settings import TraceSettings
from tessera.scheduler.v1.queue_pb2 import ReplyKind, RequestSpec

_EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_SCOPE = "tessera"
# Spans within others: all others are within the request's.
_PARENTS = {
    "fetch": "prepare",
    "decode_media": "prepare",
    "tokenize": "prepare",
    "encode_queue": "encode",
    "encode_compute": "encode",
}
_OPERATIONS = {
    ReplyKind.REPLY_KIND_COMPLETION: "text_completion",
    ReplyKind.REPLY_KIND_TGI: "text_completion",
    ReplyKind.REPLY_KIND_VLLM: "text_completion",
    ReplyKind.REPLY_KIND_TRITON: "text_completion",
    ReplyKind.REPLY_KIND_MINDIE: "text_completion",
    ReplyKind.REPLY_KIND_OLLAMA_GENERATE: "text_completion",
    ReplyKind.REPLY_KIND_OLLAMA_GENERATE_MESSAGE: "text_completion",
    ReplyKind.REPLY_KIND_POOLED: "embeddings",
}
_FINISHED = ("stop", "length")
_LEFT = "abort"


class OtlpSender:
    """Sends traces to one collector."""

    def __init__(self, settings: TraceSettings) -> None:
        self._settings = settings
        self._channel: grpc.aio.Channel | None = None

    async def send(self, request: ExportTraceServiceRequest) -> None:
        """Sends a request. Raises OSError or grpc.aio.AioRpcError."""
        if self._settings.protocol == "grpc":
            await self._by_grpc(request)
        else:
            await asyncio.to_thread(self._by_http, request.SerializeToString())

    async def close(self) -> None:
        """Ends the connection."""
        if self._channel is not None:
            await self._channel.close()

    async def _by_grpc(self, request: ExportTraceServiceRequest) -> None:
        if self._channel is None:
            self._channel = self._open()
        call = self._channel.unary_unary(
            _EXPORT,
            request_serializer=ExportTraceServiceRequest.SerializeToString,
            response_deserializer=ExportTraceServiceResponse.FromString,
        )
        metadata = tuple((name.lower(), value) for name, value in self._settings.headers)
        await call(request, timeout=self._settings.timeout_s, metadata=metadata)

    def _open(self) -> grpc.aio.Channel:
        scheme, _, address = self._settings.endpoint.rpartition("://")
        address = address.rstrip("/")
        if scheme == "https":
            return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials())
        return grpc.aio.insecure_channel(address)

    def _by_http(self, body: bytes) -> None:
        headers = {"Content-Type": "application/x-protobuf", **dict(self._settings.headers)}
        request = urllib.request.Request(self._settings.endpoint, body, headers)
        with urllib.request.urlopen(request, timeout=self._settings.timeout_s) as answer:
            answer.read()


def request_of(
    settings: TraceSettings, timelines: Iterable[tuple[RequestSpec, RequestTimeline]]
) -> ExportTraceServiceRequest:
    """The traces of requests, as they are sent: the spans of each service under a resource of its own."""
    by_resource: dict[tuple[str, str], list[Span]] = {}
    for head, timeline in timelines:
        for service, replica, span in _spans(head, timeline):
            by_resource.setdefault((service, replica), []).append(span)
    return ExportTraceServiceRequest(
        resource_spans=[
            ResourceSpans(
                resource=Resource(attributes=_resource(settings, service, replica)),
                scope_spans=[ScopeSpans(scope=InstrumentationScope(name=_SCOPE), spans=spans)],
            )
            for (service, replica), spans in by_resource.items()
        ]
    )


def _resource(settings: TraceSettings, service: str, replica: str) -> list[KeyValue]:
    name = settings.service_name
    own = {"service.name": name if service == "gateway" else f"{name}.{service}"}
    if replica:
        own["service.instance.id"] = replica
    return _attributes({**dict(settings.resource), **own})


def _spans(head: RequestSpec, timeline: RequestTimeline) -> Iterable[tuple[str, str, Span]]:
    trace = bytes.fromhex(timeline.trace_id)
    parent = trace_parent(head.traceparent)
    root_id = _span_id(timeline.request_id, "")
    began = round(1e9 * timeline.started)
    moments = [span for span in timeline.spans if not span.duration_ms]
    lasting = [span for span in timeline.spans if span.duration_ms]
    gateway = next((span.replica for span in timeline.spans if span.service == "gateway"), "")
    about = _about(head, timeline)
    yield (
        "gateway",
        gateway,
        Span(
            trace_id=trace,
            span_id=root_id,
            parent_span_id=bytes.fromhex(parent[1]) if parent is not None else b"",
            name=f"{about['gen_ai.operation.name']} {head.model}",
            kind=Span.SPAN_KIND_SERVER,
            start_time_unix_nano=began,
            end_time_unix_nano=began + round(1e6 * timeline.duration_ms),
            attributes=_attributes(about),
            events=[
                Span.Event(
                    time_unix_nano=began + round(1e6 * moment.start_ms),
                    name=moment.name,
                    attributes=_attributes(_own(moment.attributes)),
                )
                for moment in moments
            ],
            status=_status(timeline),
        ),
    )
    ids = {id(span): _span_id(timeline.request_id, str(n)) for n, span in enumerate(lasting)}
    for span in lasting:
        holder = _holder(span, lasting)
        yield (
            span.service,
            span.replica,
            Span(
                trace_id=trace,
                span_id=ids[id(span)],
                parent_span_id=ids[id(holder)] if holder is not None else root_id,
                name=span.name,
                kind=Span.SPAN_KIND_INTERNAL,
                start_time_unix_nano=began + round(1e6 * span.start_ms),
                end_time_unix_nano=began + round(1e6 * span.end_ms),
                attributes=_attributes(_own(span.attributes)),
            ),
        )


def _holder(span: Seen, spans: Sequence[Seen]) -> Seen | None:
    """The span that a span is a part of; None is the request's."""
    name = _PARENTS.get(span.name)
    fit = (one for one in spans if one.name == name and one.replica == span.replica)
    # Times are rounded, and parts that are placed by their durations may begin a moment early.
    around = (one for one in fit if one.start_ms - 1 <= span.start_ms <= one.end_ms)
    return next(around, None)


def _about(head: RequestSpec, timeline: RequestTimeline) -> dict[str, Any]:
    said = {span.name: span.attributes for span in timeline.spans if span.service == "gateway"}
    found: dict[str, Any] = {
        "gen_ai.operation.name": _OPERATIONS.get(head.reply.kind, "chat"),
        "gen_ai.provider.name": "tessera",
        "gen_ai.request.model": head.model,
        "gen_ai.response.model": head.model,
        "gen_ai.response.id": timeline.request_id,
        "tessera.request_id": timeline.request_id,
    }
    if head.client_request_id:
        found["tessera.client_request_id"] = head.client_request_id
    if not head.HasField("pooling"):
        sampling = head.sampling
        found["gen_ai.request.max_tokens"] = sampling.max_tokens
        found["gen_ai.request.temperature"] = sampling.temperature
        found["gen_ai.request.top_p"] = sampling.top_p
        found["gen_ai.request.choice.count"] = sampling.n
    if "prompt_tokens" in said.get("admit", {}):
        found["gen_ai.usage.input_tokens"] = said["admit"]["prompt_tokens"]
    if "tokens" in said.get("deliver", {}):
        found["gen_ai.usage.output_tokens"] = said["deliver"]["tokens"]
    finish = said.get("end", {}).get("finish")
    if finish in _FINISHED:
        found["gen_ai.response.finish_reasons"] = [finish]
    elif finish is not None and finish != _LEFT:
        found["error.type"] = finish
    if timeline.notes:
        found["tessera.notes"] = timeline.notes
    return found


def _status(timeline: RequestTimeline) -> Status:
    finish = next((s.attributes.get("finish") for s in timeline.spans if s.name == "end"), None)
    if finish is None or finish in (*_FINISHED, _LEFT):
        return Status()
    return Status(code=Status.STATUS_CODE_ERROR, message=str(finish))


def _own(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {f"tessera.{name}": value for name, value in attributes.items()}


def _attributes(found: Mapping[str, Any]) -> list[KeyValue]:
    return [KeyValue(key=name, value=_value(value)) for name, value in found.items()]


def _value(value: Any) -> AnyValue:
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    if isinstance(value, list):
        return AnyValue(array_value=ArrayValue(values=[_value(one) for one in value]))
    return AnyValue(string_value=str(value))


def _span_id(request_id: str, which: str) -> bytes:
    """The same each time: a trace that came twice would still be one."""
    return hashlib.blake2b(f"{request_id}/{which}".encode(), digest_size=8).digest()
