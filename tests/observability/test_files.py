"""The document of metrics, the board and the alerts, without a server."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import metrics_table

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy/prometheus"
GRAFANA = ROOT / "deploy/grafana"
BOARD = GRAFANA / "boards/tessera.json"
STAGES = {"Gateway", "Queue", "Preprocess", "Vision encoder", "Scheduler", "Decoder"}
# What Prometheus and prometheus_client have of every process.
OTHERS = re.compile(r"^(up|ALERTS|process_\w+)$")
WIDTH = 24


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(BOARD.read_text())["panels"]
    return found


def queries() -> Iterator[str]:
    for panel in panels():
        for target in panel.get("targets", ()):
            yield target["expr"]


def promtool(*arguments: str) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    done = subprocess.run(
        ["promtool", *arguments], cwd=PROMETHEUS, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_tables_of_metrics_are_those_of_the_services() -> None:
    text = metrics_table.FILE.read_text(encoding="utf-8")
    assert text.count("<!-- metrics of ") == len(metrics_table.rows())
    hint = "run python -m tests.support.metrics_table"
    assert metrics_table.written(text) == text, hint


def test_every_series_has_a_name_of_its_own_that_says_its_unit() -> None:
    rows = [row for table in metrics_table.rows().values() for row in table]
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert row.meaning.endswith("."), row.name
        said = row.name.removesuffix("_total").rpartition("_")[2]
        if said in ("seconds", "bytes"):
            assert row.unit == said, row.name
        elif row.unit in ("seconds", "bytes"):
            pytest.fail(f"{row.name} is in {row.unit} and does not say so")


def test_the_board_has_a_row_for_each_stage_and_its_panels_do_not_overlap() -> None:
    rows = {panel["title"].partition(":")[0] for panel in panels() if panel["type"] == "row"}
    assert rows >= STAGES
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        assert place["x"] >= 0 and place["x"] + place["w"] <= WIDTH, panel["title"]
        covered = {
            (place["x"] + right, place["y"] + down)
            for right in range(place["w"])
            for down in range(place["h"])
        }
        assert not covered & taken, panel["title"]
        taken |= covered


def test_the_board_reads_the_source_that_is_provisioned() -> None:
    board = json.loads(BOARD.read_text())
    (source,) = board["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == (
        "source",
        "datasource",
        "prometheus",
    )
    for panel in panels():
        assert all(t["datasource"]["uid"] == "${source}" for t in panel.get("targets", ()))
    assert "type: prometheus" in (GRAFANA / "provisioning/datasources/prometheus.yml").read_text()
    folder = "/etc/tessera/boards"
    assert folder in (GRAFANA / "provisioning/dashboards/tessera.yml").read_text()
    assert (
        f"./deploy/grafana/boards:{folder}:ro" in (ROOT / "compose.observability.yaml").read_text()
    )


def test_boards_and_alerts_name_documented_series_alone() -> None:
    rows = [row for table in metrics_table.rows().values() for row in table]
    known = {row.name for row in rows}
    for row in rows:
        if row.kind == "histogram":
            known |= {f"{row.name}_{part}" for part in ("bucket", "sum", "count")}
    text = "\n".join(queries()) + (PROMETHEUS / "alerts.yml").read_text()
    named = set(re.findall(r"\b(?:tessera_|vllm:|http_)\w+", text))
    assert len(named) > 40
    assert named - known == set()


def test_what_is_only_there_in_trouble_is_0_else() -> None:
    for panel in panels():
        said = "only in trouble" in panel.get("description", "").lower()
        guarded = [target["expr"].endswith("or vector(0)") for target in panel.get("targets", ())]
        assert any(guarded) == said, panel["title"]


def test_prometheus_takes_its_configuration_and_the_alerts() -> None:
    promtool("check", "config", "prometheus.yml")
    promtool("check", "config", "local.yml")
    promtool("check", "rules", "alerts.yml")


def test_alerts_fire_when_they_should() -> None:
    promtool("test", "rules", "alerts_test.yml")


def test_docker_compose_takes_both_files() -> None:
    files = ["-f", "compose.yaml", "-f", "compose.observability.yaml"]
    try:
        done = subprocess.run(
            ["docker", "compose", *files, "config", "--format", "json"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("docker is not installed")
    if "not a docker command" in done.stderr or "unknown" in done.stderr:
        pytest.skip("docker compose is not installed")
    assert done.returncode == 0, done.stderr
    services = json.loads(done.stdout)["services"]
    scraped = set(re.findall(r"names: \[([\w-]+)\]", (PROMETHEUS / "prometheus.yml").read_text()))
    listening = {
        name
        for name, service in services.items()
        if service.get("environment", {}).get("TESSERA_METRICS_LISTEN") == "0.0.0.0:9100"
    }
    assert scraped == listening == set(services) - {"redis", "prometheus", "grafana"}
    for name in ("prometheus", "grafana"):
        assert re.fullmatch(r"\S+:v?\d+\.\d+\.\d+", services[name]["image"])
        assert all(port["host_ip"] == "127.0.0.1" for port in services[name]["ports"])
