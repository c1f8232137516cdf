"""Exemplars of histograms, where traces are exported and a scraper asks for OpenMetrics: a real Prometheus has them."""

import asyncio
import contextlib
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from tests.support.gateway.stage import Stage, open_stage
from tests.support.network.ports import free_ports

OPEN_METRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
TRACE = "0af7651916cd43dd8448eb211c80319c"
SAMPLED, NOT_SAMPLED = f"00-{TRACE}-b7ad6b7169203331-01", f"00-{TRACE}-b7ad6b7169203331-00"
TTFT = "vllm:time_to_first_token_seconds"
CONFIG = """
global: {{scrape_interval: 1s}}
scrape_configs:
  - job_name: gateway
    static_configs: [{{targets: ["{target}"]}}]
"""


@pytest.fixture
async def traced(
    redis_url: str, model_folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Stage]:
    """A gateway that exports traces to where nobody listens."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    async with open_stage(redis_url, model_folder, tokenizer) as stage:
        yield stage


async def ask(stage: Stage, traceparent: str) -> None:
    body = {"prompt": "one", "max_tokens": 3}
    reply = await stage.http.post(
        "/v1/completions", json=body, headers={"traceparent": traceparent}
    )
    assert reply.status_code == 200


def exemplars(page: str) -> dict[str, set[str]]:
    """The traces of each family."""
    return {
        family.name: {s.exemplar.labels["trace_id"] for s in family.samples if s.exemplar}
        for family in text_string_to_metric_families(page)  # type: ignore[no-untyped-call]
        if any(sample.exemplar for sample in family.samples)
    }


async def test_only_who_asks_for_them_gets_exemplars_and_only_of_exported_traces(
    traced: Stage,
) -> None:
    accept = {"Accept": OPEN_METRICS}
    await ask(traced, NOT_SAMPLED)
    page = await traced.http.get("/metrics", headers=accept)
    assert page.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert exemplars(page.text) == {}
    await ask(traced, SAMPLED)
    found = exemplars((await traced.http.get("/metrics", headers=accept)).text)
    assert {TTFT, "vllm:e2e_request_latency_seconds"} <= set(found)
    assert all(traces == {TRACE} for traces in found.values())
    plain = await traced.http.get("/metrics", headers={"Accept": "text/plain;version=0.0.4"})
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "trace_id" not in plain.text


async def test_without_traces_the_page_stays_as_it_is(stage: Stage) -> None:
    await ask(stage, SAMPLED)
    page = await stage.http.get("/metrics", headers={"Accept": OPEN_METRICS})
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "trace_id" not in page.text


@pytest.mark.skipif(
    shutil.which("prometheus") is None,
    reason="prometheus is not installed (Debian: apt-get install prometheus)",
)
async def test_a_prometheus_keeps_them(traced: Stage, tmp_path: Path) -> None:
    await ask(traced, SAMPLED)
    target = traced.gateway.url.removeprefix("http://")
    (tmp_path / "p.yml").write_text(CONFIG.format(target=target))
    (port,) = free_ports(1)
    command = ["prometheus", "--config.file=p.yml", "--storage.tsdb.path=data"]
    command.append(f"--web.listen-address=127.0.0.1:{port}")
    command.append("--enable-feature=exemplar-storage")
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}/api/v1/query_exemplars"
        found: list[Any] = []
        async with httpx.AsyncClient() as client, asyncio.timeout(120):
            while not found:
                await asyncio.sleep(0.2)
                asked: dict[str, Any] = {
                    "query": f"{TTFT}_bucket",
                    "start": 0,
                    "end": time.time() + 60,
                }
                with contextlib.suppress(httpx.TransportError, ValueError):
                    found = (await client.get(url, params=asked)).json().get("data") or []
    finally:
        process.terminate()
        process.wait(10)
    (exemplar,) = found[0]["exemplars"]
    assert exemplar["labels"] == {"trace_id": TRACE} and float(exemplar["value"]) > 0
