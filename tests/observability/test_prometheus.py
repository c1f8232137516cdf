"""A Prometheus that scrapes a system which has served pictures and texts: no panel of the board is empty."""

import asyncio
import contextlib
import json
import math
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from services.launcher.ports import is_free
from tests.observability.test_files import PROMETHEUS, ROOT, panels
from tests.support import metrics_table
from tests.support.network.ports import free_ports
from tests.support.pictures import data_url, png
from tests.support.processes.system import System

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None,
    reason="prometheus is not installed (Debian: apt-get install prometheus)",
)

PAGES = 6
SERVICES = {"launcher", "gateway", "scheduler", "decoder", "vision_encoder", "preprocess"}
# Names that are vLLM's break rules of promtool for new ones.
VLLMS = "vllm:"
SCRAPE_S = 1
WINDOW = "30s"
MANY = 4


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    first = next(p for p in iter(lambda: free_ports(1)[0], None) if _are_free(p))
    with System(None, "--metrics-listen", f"127.0.0.1:{first}") as system:
        yield system


def _are_free(first: int) -> bool:
    return all(is_free("127.0.0.1", first + number) for number in range(PAGES))


@pytest.fixture(scope="module")
def pages(system: System) -> dict[str, str]:
    """Of each service the address of its page, as the state folder lists them."""
    listed = json.loads((system.folder / "state/metrics.json").read_text())
    return {group["labels"]["job"]: group["targets"][0] for group in listed}


@pytest.fixture(scope="module")
def prometheus(system: System, pages: dict[str, str], tmp_path_factory: Any) -> Iterator[str]:
    """The URL of a Prometheus with deploy/prometheus/local.yml, which has scraped before and after requests."""
    folder: Path = tmp_path_factory.mktemp("prometheus")
    (folder / "metrics.json").symlink_to(system.folder / "state/metrics.json")
    shutil.copy(PROMETHEUS / "alerts.yml", folder)
    text = (
        (PROMETHEUS / "local.yml").read_text().replace("scrape_interval: 5s", "scrape_interval: 1s")
    )
    (folder / "local.yml").write_text(text)
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    # Debian's own default is a folder that all share.
    command = ["prometheus", "--config.file=local.yml", "--storage.tsdb.path=data"]
    command.append(f"--web.listen-address=127.0.0.1:{port}")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        _until(lambda: len(asked(url, "up == 1")) == PAGES, folder / "log")
        # What has labels appears with its first value, and grows from the second on.
        for begin in (0, MANY):
            asyncio.run(ask(system, begin))
            time.sleep(3 * SCRAPE_S)
        yield url
    finally:
        process.terminate()
        process.wait(10)


def _until(is_so: Any, log: Path, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while True:
        with contextlib.suppress(httpx.TransportError, json.JSONDecodeError):  # it begins
            if is_so():
                return
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)


async def ask(system: System, begin: int) -> None:
    """Texts and pictures, some of them twice."""
    async with openai.AsyncOpenAI(base_url=system.base_url, api_key="none") as client:

        async def one(content: Any, stream: bool) -> None:
            answer: Any = await client.chat.completions.create(
                model="tessera-demo",
                messages=[{"role": "user", "content": content}],
                max_tokens=16,
                extra_body={"ignore_eos": True},
                stream=stream,
            )
            if stream:
                async for _ in answer:
                    pass

        for number in (*range(begin, begin + MANY), begin):
            picture = {"type": "image_url", "image_url": {"url": data_url(png(number))}}
            question = {"type": "text", "text": "What is in the picture?"}
            await asyncio.gather(one("Hello!", True), one([picture, question], False))


def asked(url: str, query: str) -> list[dict[str, Any]]:
    """The instant vector of a query."""
    answer = httpx.get(f"{url}/api/v1/query", params={"query": query}, timeout=10).json()
    assert answer["status"] == "success", (query, answer)
    found: list[dict[str, Any]] = answer["data"]["result"]
    return found


def test_each_process_has_a_page_that_promtool_takes(pages: dict[str, str]) -> None:
    assert set(pages) == SERVICES
    documented = {row.name: row.kind for table in metrics_table.rows().values() for row in table}
    for service, address in pages.items():
        page = httpx.get(f"http://{address}/metrics")
        assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
        done = subprocess.run(
            ["promtool", "check", "metrics"],
            input=page.text,
            capture_output=True,
            text=True,
            check=False,
        )
        found = [line for line in done.stderr.splitlines() if not line.startswith(VLLMS)]
        assert found == [], service
        assert (
            f'tessera_service_info{{model_name="tessera-demo",service="{service}"}} 1.0'
            in page.text
        )
        for family in metrics_table.exported(page.text):
            assert documented.get(metrics_table.query_name(family)) == family.type, family.name
        assert httpx.get(f"http://{address}/other").status_code == 404
        assert httpx.post(f"http://{address}/metrics").status_code == 405


def test_no_panel_is_empty(prometheus: str) -> None:
    empty, in_trouble = [], []
    for panel in panels():
        for target in panel.get("targets", ()):
            query = target["expr"].replace("$__rate_interval", WINDOW)
            values = [float(one["value"][1]) for one in asked(prometheus, query)]
            if query.endswith("or vector(0)"):
                if not values or any(values):
                    in_trouble.append((panel["title"], query, values))
            elif not values or not all(map(math.isfinite, values)):
                empty.append((panel["title"], query, values))
    assert empty == []
    assert in_trouble == []


def test_what_was_served_is_counted_at_every_stage(prometheus: str) -> None:
    requests = 4 * (MANY + 1)
    pictures = requests // 2

    def value(query: str) -> float:
        (one,) = asked(prometheus, query)
        return float(one["value"][1])

    assert value("sum(vllm:request_success_total)") == requests
    assert value("sum(tessera_preprocess_prompts_total)") == requests
    assert value('tessera_preprocess_prompts_total{media="yes"}') == pictures
    assert value("tessera_preprocess_cache_queries_total") == pictures
    assert value("tessera_preprocess_cache_hits_total") == 2  # the ones that came twice
    assert value("tessera_encoder_batch_items_sum") == 2 * MANY
    assert value("tessera_encoder_rows_total") > 0
    assert value("sum(tessera_scheduler_taken_requests_total)") == requests
    tokens = value("tessera_decoder_sampled_tokens_total")
    # Right drafts may reach beyond an answer's end: they were chosen, and are nobody's.
    assert value("sum(vllm:generation_tokens_total)") == 16 * requests <= tokens
    computed = value("tessera_decoder_computed_tokens_total")
    # A plan says how many drafts there may be.
    assert tokens <= computed <= value("sum(tessera_scheduler_step_planned_tokens_sum)")
    assert value("sum(tessera_scheduler_kv_blocks{state='used'})") == 0
    assert value("sum(tessera_process_ready)") == PAGES  # the five services and Redis
    assert value("tessera_decoder_bound") == 1


def test_the_alerts_are_loaded_and_silent(prometheus: str) -> None:
    groups = httpx.get(f"{prometheus}/api/v1/rules").json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == (ROOT / "deploy/prometheus/alerts.yml").read_text().count("- alert:")
    assert [rule["name"] for rule in rules if rule["state"] != "inactive"] == []
    assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
