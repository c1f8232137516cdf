"""`tessera serve --prewarmed-processes`: a service that ends goes on in a process that had its libraries imported."""

from functools import partial

import psutil
import pytest
from openai import OpenAI

from tests.support.processes.system import System
from tests.support.waiting import until

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]
SERVICES = ("gateway", "scheduler", "preprocess", "decoder")


def processes(system: System, service: str) -> dict[int, bool]:
    """Of each process of a service, by its pid, whether it was started prewarmed."""
    found = {}
    for child in psutil.Process(system.pid).children():
        try:
            command = child.cmdline()
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        if f"services.{service}" in command:
            found[child.pid] = any(part.endswith("prewarmed_process.py") for part in command)
    return found


def waiting(system: System) -> bool:
    return all(any(processes(system, service).values()) for service in SERVICES)


def taken_over(system: System, service: str, prewarmed: int) -> bool:
    """Whether that process serves, and another one is ready behind it."""
    found = processes(system, service)
    return len(found) == 2 and all(found.values()) and prewarmed in found


def ask(system: System) -> str | None:
    with OpenAI(base_url=system.base_url, api_key="none", max_retries=20) as client:
        answer = client.chat.completions.create(
            model="tessera-demo",
            messages=[{"role": "user", "content": "What is 2 + 2?"}],
            max_tokens=8,
            temperature=0,
        )
    return answer.choices[0].message.content


def test_services_that_end_go_on_in_prewarmed_processes() -> None:
    with System(None, "--language-model-only", "--prewarmed-processes") as system:
        expected = ask(system)
        until(lambda: waiting(system), "a prewarmed process of each service")
        for service in ("decoder", "preprocess"):
            before = processes(system, service)
            (serving,) = (pid for pid, prewarmed in before.items() if not prewarmed)
            (prewarmed,) = (pid for pid, prewarmed in before.items() if prewarmed)
            psutil.Process(serving).kill()
            until(partial(taken_over, system, service, prewarmed), f"the {service} that was ready")
            assert ask(system) == expected
        pids = system.all_pids()
        assert system.stop() == 0
        assert not any(psutil.pid_exists(pid) for pid in pids)
