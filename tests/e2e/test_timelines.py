"""Why a request was slow: one timeline over all services, by the API, the command line and a collector of traces."""

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import httpx
import pytest
from openai import OpenAI
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from services.launcher import logs, why
from services.launcher.state.log_files import lines_about
from services.launcher.supervise.process_table import read_process_table
from tests.support.pictures import data_url, png
from tests.support.processes.system import System

pytestmark = pytest.mark.timeout(600)

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


class Collector:
    """An OTLP TraceService that keeps what it gets: spans with the name of their service."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Span]] = []
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        handler = grpc.unary_unary_rpc_method_handler(
            self._export,
            request_deserializer=ExportTraceServiceRequest.FromString,
            response_serializer=ExportTraceServiceResponse.SerializeToString,
        )
        service = "opentelemetry.proto.collector.trace.v1.TraceService"
        handlers = grpc.method_handlers_generic_handler(service, {"Export": handler})
        self._server.add_generic_rpc_handlers((handlers,))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def of(self, trace_id: str) -> list[tuple[str, Span]]:
        """The spans of one trace, once its request's own is there."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            found = [(name, s) for name, s in self.spans if s.trace_id.hex() == trace_id]
            if any(span.kind == Span.SPAN_KIND_SERVER for _, span in found):
                return found
            time.sleep(0.1)
        raise AssertionError(f"no trace {trace_id}")

    def close(self) -> None:
        self._server.stop(0).wait()

    def _export(
        self, request: ExportTraceServiceRequest, _: grpc.ServicerContext
    ) -> ExportTraceServiceResponse:
        for resource in request.resource_spans:
            said = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [(said["service.name"], span) for span in scope.spans]
        return ExportTraceServiceResponse()


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    opened = Collector()
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def system(collector: Collector) -> Iterator[System]:
    with pytest.MonkeyPatch.context() as environment:
        endpoint = f"http://127.0.0.1:{collector.port}"
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        environment.setenv("OTEL_SERVICE_NAME", "shop")
        flags = ("--decoders", "2", "--log-format", "json", "--log-level", "debug")
        with System(None, *flags) as running:
            yield running


@pytest.fixture(scope="module")
def client(system: System) -> Iterator[OpenAI]:
    with OpenAI(base_url=system.base_url, api_key="none", max_retries=0, timeout=120) as opened:
        yield opened


def ask(client: OpenAI, content: Any, headers: dict[str, str] | None = None, **more: Any) -> str:
    """Asks, waits for the answer, and returns the request's id."""
    reply = client.chat.completions.with_raw_response.create(
        model="tessera-demo",
        messages=[{"role": "user", "content": content}],
        extra_headers=headers,
        **more,
    )
    found: str = reply.headers["x-tessera-request-id"]
    return found


def timeline(system: System, request_id: str) -> dict[str, Any]:
    path = f"{system.base_url}/requests/{request_id}/timeline"
    reply = httpx.get(path, headers={"Authorization": "Bearer none"}, timeout=30)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def kept_lines(system: System, name: str) -> list[dict[str, Any]]:
    lines = lines_about(system.folder / "state" / "logs", name)
    return [json.loads(line.text) for line in lines]


def attributes(span: Span) -> dict[str, Any]:
    return {a.key: getattr(a.value, str(a.value.WhichOneof("value"))) for a in span.attributes}


def test_an_image_request_has_spans_of_every_service_and_one_trace(
    system: System, client: OpenAI, collector: Collector
) -> None:
    picture = {"type": "image_url", "image_url": {"url": data_url(png(7))}}
    parent = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    rid = ask(client, [picture, {"type": "text", "text": "How many circles?"}], parent)
    found = timeline(system, rid)

    spans = {span["name"]: span for span in found["spans"]}
    services = {
        "read": "gateway",
        "reserve": "gateway",
        "prepare": "preprocess",
        "fetch": "preprocess",
        "decode_media": "preprocess",
        "tokenize": "preprocess",
        "admit": "gateway",
        "queue": "queue",
        "take": "scheduler",
        "schedule": "scheduler",
        "encode": "vision_encoder",
        "encode_queue": "vision_encoder",
        "encode_compute": "vision_encoder",
        "prefill": "decoder",
        "decode": "decoder",
        "log": "scheduler",
        "deliver": "gateway",
        "end": "gateway",
    }
    assert {name: spans[name]["service"] for name in services} == services
    assert spans["encode_compute"]["attributes"]["batch_items"] == 1
    assert spans["end"]["attributes"] == {"finish": "stop"}
    assert found["request_id"] == rid and found["model"] == "tessera-demo"
    assert found["trace_id"] == TRACE and found["notes"] == [] and found["state"] == "ended"
    assert next(iter(found["parts"])) == found["largest"]["name"]
    assert sum(found["parts"].values()) == pytest.approx(found["duration_ms"], abs=0.1)
    assert found["largest"]["waited_for"] in found["text"]
    prompt = sum(s["attributes"]["tokens"] for s in found["spans"] if s["name"] == "prefill")
    assert prompt == spans["prefill"]["attributes"]["prompt_tokens"] > 64

    traced = collector.of(TRACE)
    assert {name for name, _ in traced} == {
        "shop",
        "shop.preprocess",
        "shop.queue",
        "shop.scheduler",
        "shop.vision_encoder",
        "shop.decoder",
    }
    [root] = [span for _, span in traced if span.kind == Span.SPAN_KIND_SERVER]
    assert root.name == "chat tessera-demo" and root.parent_span_id.hex() == PARENT
    said = attributes(root)
    assert said["gen_ai.usage.input_tokens"] == prompt
    assert said["gen_ai.usage.output_tokens"] > 1
    assert [v.string_value for v in said["gen_ai.response.finish_reasons"].values] == ["stop"]
    by_name = {span.name: span for _, span in traced}
    assert by_name["prefill"].parent_span_id == root.span_id
    assert by_name["encode_compute"].parent_span_id == by_name["encode"].span_id
    assert {"take", "first_token", "end"} <= {event.name for event in root.events}

    logging = {"gateway", "preprocess", "scheduler", "vision_encoder", "decoder"}
    deadline = time.monotonic() + 30
    while missing := logging - {line["service"] for line in kept_lines(system, TRACE)}:
        assert time.monotonic() < deadline, f"{missing} do not name the trace"
        time.sleep(0.1)


def test_a_takeover_after_the_loss_of_a_decoder_is_in_timeline_and_trace(
    system: System, client: OpenAI, collector: Collector
) -> None:
    with client.chat.completions.with_streaming_response.create(
        model="tessera-demo",
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=900,
        stream=True,
        extra_body={"ignore_eos": True},
    ) as stream:
        rid = stream.headers["x-tessera-request-id"]
        for number, _ in enumerate(stream.iter_lines()):
            if number == 40:
                while not (decoder := running_on(system, rid)):
                    time.sleep(0.05)
                kill(system, decoder)
    found = timeline(system, rid)
    takes = [span for span in found["spans"] if span["name"] == "take"]
    assert [take["attributes"]["attempt"] for take in takes] == [1, 2]
    [takeover] = [span for span in found["spans"] if span["name"] == "takeover"]
    assert "decoder was lost" in takeover["attributes"]["why"]
    assert takeover["attributes"]["tokens"] == takes[1]["attributes"]["tokens"] > 0
    decodes = [span for span in found["spans"] if span["name"] == "decode"]
    assert len(decodes) == 2 and decodes[0]["replica"] != decodes[1]["replica"]
    assert sum(span["attributes"]["tokens"] for span in decodes) >= 890
    assert any(
        span["attributes"]["recomputed"] for span in found["spans"] if span["name"] == "prefill"
    )
    traced = collector.of(rid[-32:])
    assert [span.name for _, span in traced].count("takeover") == 1
    time.sleep(2.5)  # another gateway or scheduler would have sent it again by now
    assert len(collector.of(rid[-32:])) == len(traced)
    system.wait_ready()


def running_on(system: System, request_id: str) -> str:
    """The decoder that computes a request, once its timeline says so."""
    spans = timeline(system, request_id)["spans"]
    found = [
        span["replica"]
        for span in spans
        if span["name"] == "prefill" and span["service"] == "decoder"
    ]
    return str(found[0]) if found else ""


def kill(system: System, instance: str) -> None:
    """Kills the decoder with this incarnation, which its log lines name."""
    lines = [json.loads(line) for line in system.log.splitlines() if line.startswith("{")]
    process = next(
        line["process"]
        for line in lines
        if line["event"] == "announced" and line["replica"] == instance
    )
    table = read_process_table(system.folder / "state")
    pid = table.entries[process].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def test_the_command_line_says_why_and_shows_the_lines_of_a_request(
    system: System, client: OpenAI, capsys: pytest.CaptureFixture[str]
) -> None:
    rid = ask(client, "Hello", {"X-Request-Id": "order-17"})
    url, state = ["--url", system.base_url], ["--state-dir", str(system.folder / "state")]
    assert why.main([rid, *url, "--api-key", "none"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{rid}  tessera-demo")
    assert "The largest part was" in printed and "it waited for" in printed
    assert all(name in printed for name in ("prefill", "decode", "queue", "█"))

    while not any(line["event"] == "request ended" for line in kept_lines(system, rid)):
        time.sleep(0.1)  # the launcher has it when it has read it
    assert logs.main([rid, *state]) == 0
    lines = capsys.readouterr().out.splitlines()
    events = [json.loads(line.partition(" | ")[2]) for line in lines]
    assert {"admitted", "taken", "request ended"} <= {event["event"] for event in events}
    assert {event["trace_id"] for event in events} == {rid[-32:]}
    assert logs.main([f"chatcmpl-{rid}", *state]) == 0  # as the answer names itself
    assert capsys.readouterr().out.splitlines() == lines
    assert logs.main(["order-17", *state]) == 0
    assert set(capsys.readouterr().out.splitlines()) <= set(lines)
    assert logs.main(["order-1", *state]) == 1

    unknown = rid[:-4] + ("0000" if rid[-4:] != "0000" else "1111")
    assert why.main([unknown, *url, *state]) == 1
    assert "is unknown" in capsys.readouterr().err
    assert why.main(["order-17", *url, *state]) == 1
    assert "is no id of a request" in capsys.readouterr().err
    assert why.main([rid, *url, *state, "--api-key", "another"]) == 1
    assert "another caller's" in capsys.readouterr().err
