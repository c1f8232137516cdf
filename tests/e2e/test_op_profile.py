"""--profile-ops: decoder and encoder log what their ops took, on request and at the end."""

import json
import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.pictures import data_url, png
from tests.support.processes.system import System

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]

SERVICES = ("decoder", "vision_encoder")


def test_services_log_their_ops_on_a_signal_and_at_the_end(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "tiny", "llava")
    with System(folder, "--profile-ops", "--log-format", "json") as system:
        ask(system)
        for service in SERVICES:
            system.kill(service, with_signal=signal.SIGUSR2)
        wait_for_totals(system, 1)
        ask(system)
        assert system.stop() == 0
        profiles = {service: profiles_of(system, service) for service in SERVICES}
    for service, ops in (
        ("decoder", {"paged_attention", "linear"}),
        ("vision_encoder", {"linear"}),
    ):
        asked, at_the_end = profiles[service]
        assert ops < asked.keys()
        total = asked.pop("total")
        assert 0 < total == sum(asked.values())
        if service == "decoder":  # tokens are generated anew; the embeddings were kept
            assert at_the_end["total"] > 0


def ask(system: System) -> None:
    picture = {"type": "image_url", "image_url": {"url": data_url(png(size=(60, 40)))}}
    content = [picture, {"type": "text", "text": "the red circle"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
    answer = httpx.post(f"{system.base_url}/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text


def wait_for_totals(system: System, count: int) -> None:
    deadline = time.monotonic() + 60
    while any(len(profiles_of(system, service)) < count for service in SERVICES):
        assert time.monotonic() < deadline, system.log
        time.sleep(0.05)


def profiles_of(system: System, service: str) -> list[dict[str, int]]:
    """Of each profile that a service has logged the calls by op."""
    found: list[dict[str, int]] = []
    current: dict[str, int] = {}
    for line in system.log.splitlines():
        said = json.loads(line) if line.startswith("{") else {}
        if said.get("event") != "op profile" or said["service"] != service:
            continue
        current[said["op"]] = said["calls"]
        if said["op"] == "total":
            found.append(current)
            current = {}
    return found
