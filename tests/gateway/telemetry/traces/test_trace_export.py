"""Traces over OTLP by http/protobuf, to a real server that refuses the first of them."""

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from tokenizers import Tokenizer

from tests.support.gateway.stage import MODEL, open_stage

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


class Collector(ThreadingHTTPServer):
    """Takes what is posted, but for the first time."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Span] = []
        self.heads: list[tuple[str, Any]] = []
        self.has_come = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.heads.append((self.path, self.headers))
        status = 503 if len(self.server.heads) == 1 else 200
        if status == 200:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.server.spans += [s for scope in resource.scope_spans for s in scope.spans]
        self.send_response(status)
        self.send_header("content-length", "0")
        self.end_headers()
        if status == 200:
            self.server.has_come.set()

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        endpoint = f"http://127.0.0.1:{server.server_address[1]}/"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=a%20b")
        yield server
        server.shutdown()
        thread.join()


async def test_a_trace_comes_by_http(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer, collector: Collector
) -> None:
    async with open_stage(redis_url, model_folder, tokenizer) as stage:
        reply = await stage.http.post(
            "/v1/completions",
            json={"prompt": "one", "max_tokens": 3},
            headers={"traceparent": f"00-{TRACE}-{PARENT}-01"},
        )
        assert reply.status_code == 200
        assert await asyncio.to_thread(collector.has_come.wait, 120)
    path, headers = collector.heads[-1]
    assert path == "/v1/traces" and headers["content-type"] == "application/x-protobuf"
    assert headers["x-team"] == "a b"
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    (root,) = (s for s in collector.spans if s.kind == Span.SPAN_KIND_SERVER)
    assert root.parent_span_id.hex() == PARENT and root.name == f"text_completion {MODEL}"
    said = {a.key: a.value.string_value for a in root.attributes}
    assert said["gen_ai.response.id"] == reply.headers["x-tessera-request-id"]
    assert {"reserve", "prepare", "deliver"} <= {span.name for span in collector.spans}
