"""What the variables of OpenTelemetry say of traces, and what a gateway does by them."""

import subprocess
import sys
from pathlib import Path

import pytest

from shared.settings import child_environment, python_path, trace_settings

_ROOT = Path(__file__).parents[4]
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.mark.parametrize(
    "changed",
    [
        {ENDPOINT: ""},
        {"OTEL_SDK_DISABLED": "true"},
        {"OTEL_SDK_DISABLED": " TRUE"},
        {"OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_traces_are_off(monkeypatch: pytest.MonkeyPatch, changed: dict[str, str]) -> None:
    for name, value in {ENDPOINT: "http://collector:4317", **changed}.items():
        monkeypatch.setenv(name, value)
    assert trace_settings() is None


def test_the_variables_are_read_as_the_specification_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDPOINT, "http://collector:4318/")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20abc, x-scope=a")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=shop,deployment.environment=test")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "")
    found = trace_settings()
    assert found is not None
    assert found.endpoint == "http://collector:4318/v1/traces"
    assert found.headers == (("authorization", "Bearer abc"), ("x-scope", "a"))
    assert "abc" not in repr(found)
    assert (found.service_name, found.sampler) == ("shop", "parentbased_always_on")
    assert found.resource == (("deployment.environment", "test"),)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://other:1/own")
    found = trace_settings()
    assert found is not None
    assert (found.endpoint, found.service_name) == ("http://other:1/own", "mine")


def test_a_gateway_that_exports_nothing_loads_nothing_for_it() -> None:
    program = """
import sys
import services.gateway.gateway
print([name for name in sys.modules if name.startswith("opentelemetry.proto") or name.endswith(".otlp")])
"""
    path = python_path(_ROOT, _ROOT / "protos")
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=child_environment(PYTHONPATH=path),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.strip() == "[]"
